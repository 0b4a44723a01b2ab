// Tables that sort by every column, with the mouse and the keyboard.

const PAGE_ROWS = 200;

/**
 * @typedef {object} Column
 * @property {string} key
 * @property {string} label
 * @property {boolean} [isNumber] aligned right
 * @property {boolean} [isPlain] without separators of thousands
 * @property {(row: any) => any} value what is sorted by
 * @property {(row: any) => string} [text] what is shown; by default the value
 * @property {(row: any) => Node} [node] shown instead of the text
 */

/** A table. Rows are compared by identity: an object that was a row before is not built again. */
class DataTable {
  #app;
  #id;
  #built = new Map(); // row -> <tr>
  #columns = [];
  #rows = [];
  #isWhole = false;
  #columnKey = "";
  #version = null;
  #head = el("tr");
  #body = el("tbody");
  #more = el("button", { type: "button" });
  #details;

  /**
   * @param {object} app
   * @param {string} id of the order in the view
   * @param {string} caption
   * @param {(row: any) => Node | null} details what a row shows when it is expanded
   */
  constructor(app, id, caption, details = null) {
    this.#app = app;
    this.#id = id;
    this.#details = details;
    const table = el("table", {}, el("caption", { class: "hidden" }, caption), el("thead", {}, this.#head), this.#body);
    this.element = el(
      "div",
      { class: "table" },
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table),
      this.#more,
    );
    this.#more.addEventListener("click", () => {
      this.#isWhole = true;
      this.#fill();
    });
  }

  /**
   * @param {Column[]} columns
   * @param {any[]} rows
   * @param {any} version of columns and rows: the same one means that there is nothing to do
   */
  update(columns, rows, version) {
    const versionKey = JSON.stringify(version);
    if (versionKey === this.#version) return;
    this.#version = versionKey;
    this.#rows = rows;
    this.#columns = columns;
    const columnKey = JSON.stringify(columns.map(({ key, label }) => [key, label]));
    if (columnKey !== this.#columnKey) {
      this.#columnKey = columnKey;
      this.#built.clear();
      this.#buildHead();
    }
    this.#fill();
  }

  get #order() {
    return this.#app.view.orders[this.#id] ?? null;
  }

  #buildHead() {
    const cells = this.#columns.map((column) => {
      const button = el("button", { type: "button" }, column.label, el("span", { class: "arrow", "aria-hidden": "true" }));
      button.addEventListener("click", () => this.#sortBy(column));
      return el("th", { scope: "col", class: column.isNumber ? "number" : null, "data-column": column.key }, button);
    });
    this.#head.replaceChildren(...(this.#details ? [el("td")] : []), ...cells);
  }

  #sortBy(column) {
    const order = this.#order;
    const isDescending = order?.key === column.key && !order.isDescending;
    this.#app.view.orders[this.#id] = { key: column.key, isDescending };
    this.#app.changed();
    this.#fill();
  }

  #fill() {
    const order = this.#order;
    for (const cell of this.#head.querySelectorAll("th")) {
      const isSorted = order?.key === cell.dataset.column;
      cell.setAttribute("aria-sort", isSorted ? (order.isDescending ? "descending" : "ascending") : "none");
    }
    const rows = sortRows(
      this.#rows,
      this.#columns.find(({ key }) => key === order?.key),
      order?.isDescending,
    );
    const shown = this.#isWhole ? rows : rows.slice(0, PAGE_ROWS);
    const built = new Map(shown.map((row) => [row, this.#built.get(row) ?? this.#buildRow(row)]));
    this.#built = built;
    setChildren(this.#body, [...built.values()].flat());
    this.#more.hidden = shown.length === rows.length;
    setText(this.#more, `Show all ${formatNumber(rows.length)} rows`);
  }

  #buildRow(row) {
    const format = ({ isPlain }) => (isPlain ? formatPlain : formatNumber);
    const cells = this.#columns.map((column) =>
      el(
        "td",
        { class: column.isNumber ? "number" : null },
        column.node?.(row) ?? column.text?.(row) ?? format(column)(column.value(row)),
      ),
    );
    if (!this.#details) return [el("tr", {}, ...cells)];
    return this.#buildExpandable(row, cells);
  }

  /** Two rows, of which the second is filled and shown while the first is expanded. */
  #buildExpandable(row, cells) {
    const { expanded } = this.#app.view;
    const id = `${this.#id}/${row.number}`;
    const button = el("button", { type: "button", class: "expand", "aria-label": `Details of trial ${row.number}` });
    const below = el("tr", { class: "details" });
    const show = () => {
      const isOpen = Boolean(expanded[id]);
      button.setAttribute("aria-expanded", String(isOpen));
      below.hidden = !isOpen;
      if (isOpen) below.replaceChildren(el("td", { colspan: cells.length + 1 }, this.#details(row)));
    };
    button.addEventListener("click", () => {
      expanded[id] = !expanded[id];
      this.#app.changed();
      show();
    });
    show();
    return [el("tr", {}, el("td", {}, button), ...cells), below];
  }
}

/** Sorted by a column; empty values and NaN come last in both directions. */
function sortRows(rows, column, isDescending) {
  if (!column) return rows;
  const sign = isDescending ? -1 : 1;
  const isEmpty = (value) => value === null || value === undefined || value === "" || Number.isNaN(value);
  return [...rows].sort((one, other) => {
    const [left, right] = [column.value(one), column.value(other)];
    if (isEmpty(left) || isEmpty(right)) return isEmpty(left) - isEmpty(right);
    return (
      sign *
      (typeof left === "number" && typeof right === "number"
        ? left - right
        : String(left).localeCompare(String(right), undefined, { numeric: true }))
    );
  });
}
