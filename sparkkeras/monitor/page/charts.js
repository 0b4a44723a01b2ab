// Charts: what to draw is described by plain objects (`Figure`), which `ChartCard` draws with ECharts or shows as a table.

/**
 * @typedef {object} ChartSpec a chart that a view wants
 * @property {string} id unique on the page
 * @property {string} title
 * @property {string} key changes whenever the figure has to be drawn again
 * @property {boolean} [isWide]
 * @property {number} [height]
 * @property {number} [minWidth] below which the chart scrolls sideways in its card
 * @property {Element[]} [controls] beside the title
 * @property {(chart: object) => void} [connect] called once with the chart of ECharts
 * @property {() => Figure} figure computed only if the chart is on the screen
 *
 * @typedef {object} Figure
 * @property {object} option of ECharts
 * @property {{name: string, colour?: string, dashed?: boolean, dot?: boolean, value?: string}[]} legend
 * @property {string[]} [notes] below the chart
 * @property {() => {columns: string[], rows: any[][], plain?: number}} table the same in numbers, of which the first `plain`
 *   columns (by default one) are without separators of thousands
 *
 * @typedef {object} Series
 * @property {string} name
 * @property {string} colour
 * @property {[number, number | null][]} points
 * @property {boolean} [dashed]
 * @property {number} [width]
 * @property {boolean} [isSmoothed] whether the smoothing of the page applies
 * @property {boolean} [isMuted] drawn faintly, without a legend
 */

/** The colours of the page's style, for drawing. */
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    text: colour("text"),
    muted: colour("muted"),
    grid: colour("grid"),
    axis: colour("axis"),
    surface: colour("surface"),
    bad: colour("bad"),
    series: Array.from({ length: 8 }, (_, index) => colour(`series-${index + 1}`)),
    scale: Array.from({ length: 5 }, (_, index) => colour(`scale-${index + 1}`)),
    heat: Array.from({ length: 3 }, (_, index) => colour(`heat-${index + 1}`)),
  };
}

/** What all charts have in common. */
function baseOption(colours) {
  return {
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: colours.muted },
    grid: { left: 8, right: 14, top: 10, bottom: 4, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
  };
}

function axisStyle(colours, isSplit) {
  return {
    axisLine: { show: !isSplit, lineStyle: { color: colours.axis } },
    axisTick: { show: false },
    minorTick: { show: false },
    axisLabel: { color: colours.muted, fontSize: 11, hideOverlap: true, formatter: formatTick },
    splitLine: { show: isSplit, lineStyle: { color: colours.grid } },
    minorSplitLine: { show: false },
  };
}

function formatTick(value) {
  if (typeof value !== "number") return value; // of a category
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e9) return size >= 1e6 ? `${trim(value / 1e6)} M` : `${trim(value / 1e3)} k`;
  return size !== 0 && (size < 1e-3 || size >= 1e9)
    ? value.toExponential(1).replace(".0e", "e").replace("e+", "e")
    : trim(value);
}

function trim(value) {
  return String(Number(value.toPrecision(6)));
}

/** A point that a logarithmic axis can show, or a gap. */
function drawable(y, isLog) {
  return Number.isFinite(y) && !(isLog && y <= 0) ? y : null;
}

/** The ends of a logarithmic axis over values from `min` to `max`: 1, 2 or 5 times a power of ten. */
const LOG_ENDS = {
  min: ({ min }) => (min > 0 && Number.isFinite(min) ? logStep(min, [5, 2, 1], (step, y) => step <= y * 1.001) : 0.1),
  max: ({ min, max }) => (min > 0 && Number.isFinite(max) ? logStep(max, [1, 2, 5, 10], (step, y) => step >= y * 0.999) : 1),
};

function logStep(y, steps, fits) {
  const power = 10 ** Math.floor(Math.log10(y) + 1e-9);
  return Number((steps.find((step) => fits(step * power, y)) * power).toPrecision(3));
}

/**
 * Lines over epochs (or trials).
 *
 * @param {Series[]} series
 * @param {object} settings
 * @param {object} settings.colours
 * @param {{smoothing: number, log: boolean, from: number | null, to: number | null}} settings.view
 * @param {number[]} [settings.marks] positions of incidents
 * @param {string} [settings.unit] of the x axis
 * @param {boolean} [settings.isLog]
 * @param {boolean} [settings.fromZero] whether the y axis includes zero
 * @param {(value: number) => string} [settings.format] of values in words
 * @returns {Figure}
 */
function lineFigure(
  series,
  { colours, view, marks = [], unit = "Epoch", isLog = view.log, fromZero = false, format = formatNumber },
) {
  const lines = series.map((one) => ({
    ...one,
    drawn: one.isSmoothed && view.smoothing > 0 ? smooth(one.points, view.smoothing) : one.points,
  }));
  const option = {
    ...baseOption(colours),
    ...xAxisOver(series, { colours, view, unit }),
    yAxis: {
      ...axisStyle(colours, true),
      type: isLog ? "log" : "value",
      scale: !fromZero,
      min: isLog ? LOG_ENDS.min : null,
      max: isLog ? LOG_ENDS.max : null,
      splitNumber: 4,
    },
    tooltip: tooltipOver(lines, { colours, unit, format }),
    series: lines.flatMap((line, index) => echartsSeries(line, { isLog, marks: index ? [] : marks, colours })),
  };
  return {
    option,
    legend: lines.filter(({ isMuted }) => !isMuted).map((line) => ({ ...line, value: format(lastOf(line.points)) })),
    notes: gapNotes(lines, isLog).concat(marks.length ? ["Dotted lines: incidents."] : []),
    table: () => tableOver(lines, unit),
  };
}

function lastOf(points) {
  return points.length ? points[points.length - 1][1] : null;
}

function xAxisOver(series, { colours, view, unit }) {
  const positions = series.flatMap(({ points }) => points.map(([x]) => x));
  const first = positions.reduce((a, b) => Math.min(a, b), positions[0] ?? 1);
  const last = positions.reduce((a, b) => Math.max(a, b), first);
  const ends = first === last ? [first - 1, last + 1] : [first, last];
  const [from, to] = unit === "Epoch" && first < last ? shownEpochs(view, first, last).ends : ends;
  return {
    xAxis: {
      ...axisStyle(colours, false),
      type: "value",
      min: ends[0],
      max: ends[1],
      minInterval: 1,
      axisLabel: { ...axisStyle(colours, false).axisLabel, customValues: first === last ? [first] : null },
      axisPointer: { show: true, snap: true, label: { show: false }, lineStyle: { color: colours.axis, type: "solid" } },
    },
    dataZoom: [
      {
        type: "inside",
        disabled: true, // no zooming with the wheel, which scrolls the page
        startValue: from,
        endValue: to,
      },
    ],
    // Dragging selects epochs. ECharts has that only as a tool of its toolbox, which is kept out of sight.
    toolbox: {
      itemSize: 0,
      left: -100,
      feature: { dataZoom: { yAxisIndex: "none", brushStyle: { color: colours.series[0], opacity: 0.2 } } },
    },
  };
}

function echartsSeries(line, { isLog, marks, colours }) {
  const style = {
    color: line.colour,
    width: line.width ?? 2,
    type: line.dashed ? [6, 4] : "solid",
    opacity: line.isMuted ? 0.55 : 1,
  };
  const data = line.drawn.map(([x, y]) => [x, drawable(y, isLog)]);
  const alone = alonePoints(data);
  const main = {
    type: "line",
    name: line.name,
    data,
    step: line.step ?? false,
    symbol: "circle",
    symbolSize: (_, { dataIndex }) => (alone.has(dataIndex) ? 7 : 0),
    showSymbol: alone.size > 0,
    lineStyle: style,
    itemStyle: { color: line.colour },
    emphasis: { disabled: true },
    z: line.isMuted ? 1 : 3,
    markLine: marks.length ? markLines(marks, colours) : undefined,
  };
  if (line.drawn === line.points) return [main];
  const raw = line.points.map(([x, y]) => [x, drawable(y, isLog)]);
  return [
    { ...main, data: raw, markLine: undefined, lineStyle: { ...style, width: 1, opacity: 0.4, type: "solid" }, z: 2 },
    main,
  ];
}

/** The indices of points without a neighbour, which no line would show. */
function alonePoints(data) {
  const isGap = (index) => data[index] === undefined || data[index][1] === null;
  return new Set([...data.keys()].filter((index) => !isGap(index) && isGap(index - 1) && isGap(index + 1)));
}

function markLines(marks, colours) {
  return {
    silent: true,
    symbol: ["none", "triangle"],
    symbolSize: 6,
    label: { show: false },
    lineStyle: { color: colours.muted, type: "dotted", width: 1.5 },
    data: marks.map((position) => ({ xAxis: position })),
  };
}

/** The values of all series at the epoch under the pointer. */
function tooltipOver(lines, { colours, unit, format }) {
  const values = lines.map((line) => new Map(line.points));
  const smoothed = lines.map((line) => (line.drawn === line.points ? null : new Map(line.drawn)));
  return tooltip(colours, "axis", (params) => {
    const x = (Array.isArray(params) ? params[0] : params).value[0];
    const rows = lines
      .map(
        (line, index) =>
          values[index].has(x) && [
            swatch(line.colour, line),
            line.name,
            format(values[index].get(x)) + (smoothed[index] ? ` (smoothed ${format(smoothed[index].get(x))})` : ""),
          ],
      )
      .filter(Boolean);
    return tooltipBox(`${unit} ${x}`, rows);
  });
}

function tooltip(colours, trigger, formatter) {
  return {
    trigger,
    formatter,
    confine: true,
    transitionDuration: 0,
    backgroundColor: colours.surface,
    borderColor: colours.axis,
    padding: [6, 10],
    textStyle: { color: colours.text, fontSize: 12 },
  };
}

/** @param {[Node | null, string, string][]} rows mark, name and value */
function tooltipBox(title, rows) {
  const body = rows.slice(0, 24).map(([mark, name, value]) => el("tr", {}, el("td", {}, mark, name), el("td", {}, value)));
  return el(
    "div",
    { class: "tooltip" },
    el("strong", {}, title),
    el("table", {}, ...body),
    rows.length > 24 && el("div", {}, `and ${rows.length - 24} more`),
  );
}

/** What a line cannot show, in words. */
function gapNotes(lines, isLog) {
  const notes = [];
  for (const { name, points } of lines) {
    const gaps = points.filter(([, y]) => typeof y === "number" && !Number.isFinite(y));
    if (gaps.length) notes.push(`${name} is ${formatNumber(gaps[0][1])} at ${someOf(gaps.map(([x]) => x))}.`);
  }
  const hidden = isLog
    ? lines.reduce((sum, { points }) => sum + points.filter(([, y]) => y <= 0 && Number.isFinite(y)).length, 0)
    : 0;
  if (hidden) notes.push(`The log scale cannot show ${plural(hidden, "value")} of zero or below.`);
  return notes;
}

function tableOver(lines, unit) {
  const positions = [...new Set(lines.flatMap(({ points }) => points.map(([x]) => x)))].sort((one, other) => one - other);
  const values = lines.map(({ points }) => new Map(points));
  return {
    columns: [unit, ...lines.map(({ name }) => name)],
    rows: positions.map((x) => [x, ...values.map((value) => value.get(x) ?? null)]),
  };
}

/** A heat map of workers by epochs. */
function heatFigure(workers, { colours }) {
  const { names, cells } = heatCells(workers);
  const seconds = cells.map(([, , value]) => value);
  // Workers of about the same speed have about the same colour, and a single epoch that took very long changes no other.
  const middle = median(seconds) || 1;
  const option = {
    ...baseOption(colours),
    xAxis: {
      ...axisStyle(colours, false),
      type: "category",
      data: names,
      axisLabel: { color: colours.muted, fontSize: 11 },
    },
    yAxis: {
      ...axisStyle(colours, false),
      type: "category",
      inverse: true,
      data: workers.map(({ worker }) => String(worker)),
      axisLabel: { color: colours.muted, fontSize: 11 },
    },
    visualMap: { show: false, min: 0, max: 2 * middle, inRange: { color: colours.heat } },
    tooltip: tooltip(colours, "item", ({ value: [column, row, value] }) =>
      tooltipBox(`Worker ${workers[row].worker}, epoch ${names[column]}`, [[null, "", formatDuration(value)]]),
    ),
    series: [{ type: "heatmap", data: cells, progressive: 0, emphasis: { disabled: true } }],
  };
  const legend = [
    { name: "median", colour: colours.heat[1], dot: true, value: formatDuration(middle) },
    { name: "slow", colour: colours.heat[2], dot: true, value: `${formatDuration(2 * middle)} or more` },
  ];
  return {
    option,
    legend,
    table: () =>
      tableOver(
        workers.map(({ worker, points }) => ({ name: `worker ${worker}`, points })),
        "Epoch",
      ),
  };
}

/** Bars of counts. */
function barFigure(counts, { colours, unit, name }) {
  return {
    option: {
      ...baseOption(colours),
      xAxis: { ...axisStyle(colours, false), type: "category", data: counts.map(([value]) => String(value)), name: "" },
      yAxis: { ...axisStyle(colours, true), type: "value", splitNumber: 4, minInterval: 1 },
      tooltip: tooltip(colours, "item", (bar) => tooltipBox(`${unit} ${bar.name}`, [[null, name, formatNumber(bar.value)]])),
      series: [
        {
          type: "bar",
          data: counts.map(([, count]) => count),
          barMaxWidth: 48,
          itemStyle: { color: colours.series[0] },
          emphasis: { disabled: true },
        },
      ],
    },
    legend: [{ name, colour: colours.series[0], dot: true }],
    table: () => ({ columns: [unit, name], rows: counts }),
  };
}

/** A chart with its title, legend, notes and the switch to a table. */
class ChartCard {
  #app;
  #id;
  #spec = null;
  #drawnKey = null;
  #isVisible = false;
  #chart = null;
  #picture = null; // of the chart while the page is printed
  #canvas = el("div", { class: "canvas", role: "img" });
  #legend = el("ul", { class: "legend" });
  #notes = el("p", { class: "notes" });
  #title = el("h3");
  #toggle = el("button", { type: "button", class: "small", "aria-pressed": "false" }, "Show as table");
  #controls = el("span", { class: "controls" });
  #table = null;
  #observers = [];

  constructor(app, spec) {
    this.#app = app;
    this.#id = spec.id;
    this.element = el(
      "article",
      { class: "card chart", "data-chart": spec.id },
      el("header", {}, this.#title, this.#controls, this.#toggle),
      this.#legend,
      el("div", { class: "frame" }, this.#canvas),
      this.#notes,
    );
    this.#canvas.style.height = `${spec.height ?? 220}px`;
    this.#canvas.style.minWidth = `${spec.minWidth ?? 0}px`;
    this.#controls.append(...(spec.controls ?? []));
    this.#toggle.addEventListener("click", () => {
      app.view.asTable[this.#id] = !app.view.asTable[this.#id];
      app.changed();
    });
    const visibility = new IntersectionObserver(
      (entries) => {
        this.#isVisible = entries.at(-1).isIntersecting;
        this.#draw();
      },
      { rootMargin: "300px" },
    );
    visibility.observe(this.element);
    const size = new ResizeObserver(() => this.#canvas.hidden || this.#chart?.resize());
    size.observe(this.#canvas);
    this.#observers = [visibility, size];
  }

  update(spec) {
    this.#spec = spec;
    setText(this.#title, spec.title);
    this.element.classList.toggle("wide", Boolean(spec.isWide));
    this.#endPrint();
    this.#draw();
    if (this.#app.isPrinting) this.#print();
  }

  /** A picture in place of the chart, in the width of the paper: of the layers of a chart, Chromium prints one. */
  #print() {
    if (!this.#chart || this.#canvas.hidden) return;
    this.#chart.resize();
    this.#picture = this.#chart.renderToCanvas({ pixelRatio: 2 });
    this.#picture.style.cssText = "display: block; width: 100%";
    this.#canvas.after(this.#picture);
    this.#canvas.hidden = true;
  }

  #endPrint() {
    if (!this.#picture) return;
    this.#picture.remove();
    this.#picture = null;
    this.#canvas.hidden = false;
  }

  dispose() {
    for (const observer of this.#observers) observer.disconnect();
    this.#chart?.dispose();
    this.element.remove();
  }

  #draw() {
    const asTable = Boolean(this.#app.view.asTable[this.#id]);
    const key = JSON.stringify([this.#spec?.key, asTable, this.#app.shownTheme]);
    if (!(this.#isVisible || this.#app.isPrinting) || !this.#spec || key === this.#drawnKey) return;
    this.#drawnKey = key;
    const figure = this.#spec.figure();
    this.#toggle.setAttribute("aria-pressed", String(asTable));
    this.#toggle.setAttribute("aria-label", `Show as table: ${this.#spec.title}`);
    this.#canvas.hidden = asTable;
    this.#drawWords(figure);
    if (asTable) this.#drawTable(figure);
    else this.#drawCanvas(figure);
  }

  #drawWords({ legend, notes = [] }) {
    this.#legend.replaceChildren(
      ...legend
        .slice(0, 12)
        .map((entry) =>
          el(
            "li",
            {},
            entry.colour && swatch(entry.colour, entry),
            el("span", {}, entry.name),
            entry.value && el("b", {}, entry.value),
          ),
        ),
    );
    if (legend.length > 12) this.#legend.append(el("li", {}, `and ${legend.length - 12} more`));
    this.#legend.hidden = !legend.length;
    setText(this.#notes, notes.join(" "));
    this.#notes.hidden = !notes.length;
    const values = legend.map(({ name, value }) => (value ? `${name} ${value}` : name)).join(", ");
    this.#canvas.setAttribute("aria-label", `Chart: ${this.#spec.title}. ${values}. ${notes.join(" ")}`);
  }

  #drawCanvas({ option }) {
    this.#table?.element.remove();
    this.#table = null;
    if (!this.#chart) {
      this.#chart = echarts.init(this.#canvas);
      this.#spec.connect?.(this.#chart);
      if (option.toolbox) this.#connectZoom();
    }
    this.#chart.setOption(option, { replaceMerge: ["series"] });
    if (option.toolbox && !matchMedia("(pointer: coarse)").matches) {
      this.#chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    }
  }

  /** All charts over epochs show the same epochs: what is selected in one is the view of all. */
  #connectZoom() {
    this.#chart.on("datazoom", ({ batch }) => {
      if (!batch?.[0] || !("startValue" in batch[0])) return;
      const [from, to] = [Math.floor(batch[0].startValue), Math.ceil(batch[0].endValue)];
      this.#app.zoom(from, Math.max(to, from + 1));
    });
    this.#chart.getZr().on("dblclick", () => this.#app.zoom(null, null));
  }

  #drawTable(figure) {
    const { columns, rows, plain = 1 } = figure.table();
    this.#table ??= new DataTable(this.#app, `chart/${this.#id}`, this.#spec.title);
    if (!this.#table.element.isConnected) this.#canvas.after(this.#table.element);
    this.#table.update(
      columns.map((label, index) => ({
        key: String(index),
        label,
        isNumber: true,
        isPlain: index < plain,
        value: (row) => row[index],
      })),
      rows,
      this.#drawnKey,
    );
  }
}

/** The charts that a view wants: makes new ones, updates those there are, removes others. */
class ChartGrid {
  #app;
  #cards = new Map();

  constructor(app) {
    this.#app = app;
    this.element = el("div", { class: "grid" });
  }

  /** @param {ChartSpec[]} specs */
  update(specs) {
    const ids = new Set(specs.map(({ id }) => id));
    for (const [id, card] of this.#cards) {
      if (ids.has(id)) continue;
      card.dispose();
      this.#cards.delete(id);
    }
    for (const spec of specs) if (!this.#cards.has(spec.id)) this.#cards.set(spec.id, new ChartCard(this.#app, spec));
    setChildren(
      this.element,
      specs.map(({ id }) => this.#cards.get(id).element),
    );
    for (const spec of specs) this.#cards.get(spec.id).update(spec);
  }

  dispose() {
    for (const card of this.#cards.values()) card.dispose();
    this.#cards.clear();
  }
}
