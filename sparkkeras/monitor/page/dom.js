// Elements. Text from messages becomes text nodes only, never markup.

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  running: "M8 2a6 6 0 1 0 6 6h-2a4 4 0 1 1-4-4z",
  finished: "M6.5 12.2 2.6 8.3 4 6.9l2.5 2.5L12 3.9l1.4 1.4z",
  failed: "M4.4 3 8 6.6 11.6 3 13 4.4 9.4 8l3.6 3.6-1.4 1.4L8 9.4 4.4 13 3 11.6 6.6 8 3 4.4z",
  interrupted: "M4 3h3v10H4zM9 3h3v10H9z",
  stopped: "M3.5 3.5h9v9h-9z",
  pruned: "M3 7h10v2H3z",
  warning: "M8 1.5 15 14H1zM7.2 6v4h1.6V6zm0 5v1.6h1.6V11z",
  again: "M8 3V.8L12 4 8 7.2V5a4 4 0 1 0 4 4h2a6 6 0 1 1-6-6z",
};

/**
 * An element. Attributes whose value is false or null are left out; `on` has listeners by event; other children than
 * elements become text.
 */
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", `icon icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name] ?? ICONS.stopped);
  path.setAttribute("fill-rule", "evenodd");
  svg.append(path);
  return svg;
}

/** A status as icon and word. */
function badge(status) {
  const name = status === "ok" ? "finished" : status;
  return el("span", { class: `badge badge-${name}` }, icon(name), status);
}

/** A short line in the style of a curve, for legends. */
function swatch(colour, { dashed = false, dot = false } = {}) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 22 8");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("aria-hidden", "true");
  const shape = document.createElementNS(SVG, dot ? "circle" : "path");
  const attributes = dot
    ? { cx: 11, cy: 4, r: 4, fill: colour }
    : { d: "M1 4h20", stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dashed ? "5 3" : "none", fill: "none" };
  for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
  svg.append(shape);
  return svg;
}

/** Set the text of an element, without touching the document if it is the same. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make `children` the children of an element; those that stay in order are not moved, and focus stays where it is. */
function setChildren(element, children) {
  const focused = document.activeElement;
  const wanted = new Set(children);
  for (const child of [...element.children]) if (!wanted.has(child)) child.remove();
  let next = element.firstElementChild;
  for (const child of children) {
    if (child === next) next = next.nextElementSibling;
    else element.insertBefore(child, next);
  }
  if (focused !== document.activeElement && element.contains(focused)) focused.focus({ preventScroll: true });
}

/** A button that copies the text of an element. */
function copyButton(source) {
  const button = el("button", { type: "button", class: "small" }, "Copy");
  button.addEventListener("click", async () => {
    setText(button, (await copyText(source)) ? "Copied" : "Press Ctrl+C to copy");
    setTimeout(() => setText(button, "Copy"), 2000);
  });
  return button;
}

/** Copy the text of an element. Pages that are not served from this machine have no clipboard: there it is selected. */
async function copyText(source) {
  try {
    await navigator.clipboard.writeText(source.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(source);
    return document.execCommand("copy");
  }
}
