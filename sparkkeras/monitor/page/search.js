// The panels of a search: charts over trials, and the table of trials with its filters.

const FILTER_HELP =
  "Words that occur in a trial, and conditions for columns: optimizer=adam, val_loss<0.1, units>=32, lr:1e-4..1e-2, epochs=12";
const STATUSES = ["running", "ok", "pruned", "stopped", "failed"];

class SearchPanel extends Panel {
  constructor(app) {
    const log = el("input", {
      type: "checkbox",
      on: {
        change: () => {
          app.view.log = log.checked;
          app.changed();
        },
      },
    });
    super(app, "Search", el("div", { class: "toolbar" }, el("label", {}, log, "Log scale")));
    this.log = log;
    this.grid = new ChartGrid(app);
    this.element.append(this.grid.element);
  }

  update(run) {
    if (!this.show(run.trials.size > 0)) return;
    this.log.checked = this.app.view.log;
    const key = JSON.stringify([run.versions.trials, this.app.view.log]);
    const { view } = this.app;
    const specs = [
      {
        id: `${run.key}/best`,
        title: `Best ${run.metric || "value"} so far`,
        key,
        figure: () => bestFigure(run, { colours: readColours(), view }),
      },
    ];
    if (trialsOf(run).some(({ values }) => values.length)) {
      specs.push({
        id: `${run.key}/trials`,
        title: `${run.metric || "value"} of all trials by epoch`,
        key,
        figure: () => trialsFigure(run, { colours: readColours(), view }),
      });
    }
    if (trialsOf(run).filter(isComplete).length > 1 && parameterNames(run).length) specs.push(this.#parallelSpec(run, key));
    this.grid.update(specs);
  }

  #parallelSpec(run, key) {
    return {
      id: `${run.key}/parallel`,
      title: "Hyper-parameters and value",
      isWide: true,
      height: 300,
      minWidth: 100 * (parameterNames(run).length + 2),
      key,
      figure: () => parallelFigure(run, { colours: readColours(), view: this.app.view }),
      connect: (chart) =>
        chart.on("axisareaselected", () => {
          const selected = chart.getModel().getSeriesByIndex(0).getRawIndicesByActiveState("active");
          const drawn = worstFirst(run);
          this.app.brush(
            run,
            selected.length && selected.length < drawn.length ? selected.map((index) => drawn[index].number) : null,
          );
        }),
    };
  }
}

/** The value of each trial, and the best so far as steps. */
function bestFigure(run, { colours, view }) {
  const trials = trialsOf(run);
  const points = (test) =>
    trials.filter((trial) => test(trial) && Number.isFinite(trial.value)).map(({ number, value }) => [number, value]);
  const groups = [
    { name: "complete", points: points(isComplete), colour: colours.series[0], symbol: "circle", dot: true },
    {
      name: "pruned",
      points: points(({ status }) => status === "pruned"),
      colour: colours.series[1],
      symbol: "triangle",
      dot: true,
    },
  ].filter((group) => group.points.length);
  const best = { name: "best so far", points: bestSoFar(run), colour: colours.series[2], step: "end" };
  const figure = lineFigure([best, ...groups], { colours, view, unit: "Trial" });
  const scatter = figure.option.series.slice(1).map((series, index) => ({
    ...series,
    type: "scatter",
    symbol: groups[index].symbol,
    symbolSize: trials.length > 200 ? 4 : 7,
    showSymbol: true,
    itemStyle: { color: groups[index].colour, opacity: 0.85 },
  }));
  const failed = trials.filter(({ status }) => status === "failed").map(({ number }) => number);
  return {
    ...figure,
    option: { ...figure.option, series: [{ ...figure.option.series[0], showSymbol: false }, ...scatter] },
    legend: [
      { ...best, value: formatNumber(lastOf(best.points)) },
      ...groups.map((group) => ({ ...group, value: String(group.points.length) })),
    ],
    notes: failed.length ? [...figure.notes, `Failed trials: ${someOf(failed)}.`] : figure.notes,
  };
}

/** The curves of all trials. One series draws them all, as a thousand series of ECharts are slow. */
function trialsFigure(run, { colours, view }) {
  const best = bestTrial(run);
  const coordinates = (trial) => valuePoints(trial).filter(([, y]) => drawable(y, view.log) !== null);
  const others = trialsOf(run)
    .filter((trial) => trial !== best)
    .map((trial) => ({ trial, coords: coordinates(trial) }))
    .filter(({ coords }) => coords.length > 1);
  const bestLine = best && {
    name: `best: trial ${best.number}`,
    colour: colours.series[2],
    width: 3,
    points: valuePoints(best),
  };
  const points = others.flatMap(({ coords }) => coords);
  // An invisible line with the lowest and highest values, since lines in one series do not extend the axes.
  const corners = { name: "", colour: "transparent", isMuted: true, points: extremes(points) };
  const figure = lineFigure([corners, bestLine].filter(Boolean), { colours, view, unit: "Epoch of the trial" });
  figure.option.series[0].showSymbol = false;
  figure.option.tooltip = tooltip(
    colours,
    "item",
    ({ data }) =>
      data?.trial &&
      tooltipBox(`Trial ${data.trial.number}`, [
        [null, data.trial.status, formatNumber(data.trial.value)],
        ...Object.entries(data.trial.params).map(([name, value]) => [null, name, formatExact(value)]),
      ]),
  );
  figure.option.series.push({
    type: "lines",
    coordinateSystem: "cartesian2d",
    polyline: true,
    data: others,
    lineStyle: { color: colours.muted, width: 1.2, opacity: faintness(others.length, 0.45) },
    z: 1,
  });
  const shown = trialsOf(run).filter(({ values }) => values.length);
  return {
    ...figure,
    legend: [
      bestLine && { ...bestLine, value: formatNumber(best.value) },
      { name: "other trials", colour: colours.muted },
    ].filter(Boolean),
    table: () =>
      tableOver(
        shown.map((trial) => ({ name: `trial ${trial.number}`, points: valuePoints(trial) })),
        "Epoch",
      ),
  };
}

/** The points [epoch of the trial from 1, value], without epochs that have no value, which a line connects. */
function valuePoints({ values }) {
  return values.map((y, index) => [index + 1, y]).filter(([, y]) => y !== null);
}

function extremes(points) {
  if (!points.length) return [];
  const low = [points[0][0], points[0][1]];
  const high = [...low];
  for (const point of points) {
    for (const axis of [0, 1]) {
      low[axis] = Math.min(low[axis], point[axis]);
      high[axis] = Math.max(high[axis], point[axis]);
    }
  }
  return [low, high];
}

/** A line for each complete trial through its hyper-parameters and its value, coloured by the rank of the value. */
function parallelFigure(run, { colours, view }) {
  const trials = worstFirst(run);
  const names = parameterNames(run);
  const axes = names.map((name, dim) => parallelAxis(run, trials, name, dim));
  const isLog = view.log && trials.every(({ value }) => value > 0);
  const valueAxis = {
    dim: names.length,
    name: run.metric || "value",
    type: isLog ? "log" : "value",
    scale: true,
    inverse: run.minimizes,
    nameLocation: run.minimizes ? "start" : "end",
  };
  if (isLog) Object.assign(valueAxis, LOG_ENDS);
  const option = {
    ...baseOption(colours),
    parallel: {
      left: 60,
      right: 60,
      top: 34,
      bottom: 18,
      parallelAxisDefault: {
        nameTextStyle: { color: colours.text, fontSize: 12 },
        nameTruncate: { maxWidth: 110 },
        axisLine: { lineStyle: { color: colours.axis } },
        axisTick: { show: false },
        minorTick: { show: false },
        axisLabel: {
          color: colours.text,
          fontSize: 11,
          textBorderColor: colours.surface,
          textBorderWidth: 3,
          hideOverlap: true,
          width: 90,
          overflow: "truncate",
        },
        areaSelectStyle: { width: 16, borderColor: colours.text, color: colours.series[0], opacity: 0.3 },
      },
    },
    parallelAxis: [...axes, valueAxis].map((axis) => ({
      ...axis,
      axisLabel: axis.type === "category" ? {} : { formatter: formatTick },
    })),
    series: [
      {
        type: "parallel",
        smooth: 0.1,
        lineStyle: { width: 1.8, opacity: faintness(trials.length, 0.8) },
        inactiveOpacity: 0.08,
        activeOpacity: 1,
        data: trials.map((trial, index) => ({
          value: [...axes.map((axis) => parallelValue(trial.params[axis.name], axis)), trial.value],
          lineStyle: { color: echarts.color.lerp(index / Math.max(1, trials.length - 1), colours.scale) },
        })),
      },
    ],
  };
  return {
    option,
    legend: [
      { name: "best", colour: colours.scale.at(-1) },
      { name: "worst", colour: colours.scale[0] },
    ],
    notes: ["Drag along an axis to select trials; the table below then shows only these."],
    table: () => ({
      columns: ["Trial", ...names, valueAxis.name],
      plain: 1 + names.length,
      rows: trials.map((trial) => [trial.number, ...names.map((name) => trial.params[name] ?? null), trial.value]),
    }),
  };
}

/** The complete trials in the order in which they are drawn, so that the best is on top. */
function worstFirst(run) {
  return trialsOf(run)
    .filter(isComplete)
    .sort((one, other) => (run.minimizes ? other.value - one.value : one.value - other.value));
}

/** The opacity of one of many lines. */
function faintness(count, most) {
  return Math.max(0.08, Math.min(most, (most * 50) / count));
}

/** The ratio of values above which an axis that is not declared is logarithmic. */
const LOG_RATIO = 1000;

/** An axis by the declared hyper-parameter; without one, by the values that trials have. */
function parallelAxis(run, trials, name, dim) {
  const declared = run.parameters.find((parameter) => parameter.name === name);
  const values = trials.map(({ params }) => params[name]).filter((value) => value !== undefined);
  const texts = values.filter((value) => typeof value !== "number").map(String);
  if (declared?.options.length || texts.length) {
    const data = [...new Set([...(declared?.options ?? []), ...values.map(String)])];
    return { dim, name, type: "category", data };
  }
  const isLog = declared ? declared.isLog : Math.max(...values) > LOG_RATIO * Math.min(...values);
  if (isLog && values.length && values.every((value) => value > 0)) {
    return { dim, name, type: "log", ...LOG_ENDS };
  }
  return { dim, name, type: "value", scale: true };
}

/** A value as a parallel axis takes it: "-" for a gap; a number would be an index on an axis of texts. */
function parallelValue(value, { type }) {
  if (value === undefined || value === null || Number.isNaN(value)) return "-";
  return type === "category" ? String(value) : value;
}

/** All trials, with filters by status, by text and by what is selected in the parallel coordinates. */
class TrialsPanel extends Panel {
  constructor(app, run) {
    const status = el("select", { on: { change: () => this.#filter({ status: status.value }) } });
    const text = el("input", {
      type: "search",
      placeholder: "adam lr<0.01 units>=32",
      title: FILTER_HELP,
      on: { input: () => this.#filter({ text: text.value }) },
    });
    const brushed = el("button", { type: "button", class: "small", on: { click: () => app.brush(run, null) } });
    const count = el("span", { class: "muted" });
    const problem = el("span", { class: "note", role: "status", hidden: true });
    super(
      app,
      "Trials",
      el(
        "div",
        { class: "toolbar" },
        el("label", {}, "Status", status),
        el("label", {}, "Filter", text),
        problem,
        brushed,
        count,
      ),
    );
    Object.assign(this, { run, status, text, brushed, count, problem });
    this.table = new DataTable(app, `${run.key}/trials`, "Trials", trialDetails(run));
    this.element.append(this.table.element);
  }

  update(run) {
    if (!this.show(run.trials.size > 0)) return;
    const filter = { status: "", text: "", ...this.app.view.filters[run.key] };
    this.#showFilters(run, filter);
    const { matches, problems } = trialFilter(filter.text, run);
    setText(this.problem, problems.join(". "));
    this.problem.hidden = !problems.length;
    const brushed = this.app.brushed.get(run.key);
    const rows = trialsOf(run).filter(
      (trial) =>
        (!filter.status || trial.status === filter.status) && matches(trial) && (!brushed || brushed.has(trial.number)),
    );
    setText(
      this.count,
      rows.length === run.trials.size
        ? plural(rows.length, "trial")
        : `${rows.length} of ${plural(run.trials.size, "trial")}`,
    );
    this.table.update(trialColumns(run), rows, [run.versions.trials, filter, brushed && [...brushed]]);
  }

  #showFilters(run, filter) {
    const counts = countBy(trialsOf(run), ({ status }) => status);
    const statuses = [
      ...new Set([
        ...STATUSES.filter((status) => counts.has(status)),
        ...counts.keys(),
        ...(filter.status ? [filter.status] : []),
      ]),
    ];
    const options = [["", "all"], ...statuses.map((status) => [status, `${status} (${counts.get(status) ?? 0})`])];
    const key = JSON.stringify(options);
    if (this.status.dataset.key !== key) {
      this.status.dataset.key = key;
      this.status.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
    }
    this.status.value = filter.status;
    if (this.text.value !== filter.text) this.text.value = filter.text;
    const brushed = this.app.brushed.get(run.key);
    this.brushed.hidden = !brushed;
    if (brushed) setText(this.brushed, `Clear selection of ${plural(brushed.size, "trial")}`);
  }

  #filter(values) {
    const { filters } = this.app.view;
    filters[this.run.key] = { ...filters[this.run.key], ...values };
    this.app.changed();
  }
}

/** Whether a hyper-parameter has numbers; one that is not declared, since trials define it, by its values. */
function isNumeric(run, name) {
  const declared = run.parameters.find((parameter) => parameter.name === name);
  if (declared) return !declared.options.length;
  return trialsOf(run).every(({ params }) => params[name] === undefined || typeof params[name] === "number");
}

function trialColumns(run) {
  return [
    { key: "trial", label: "Trial", isNumber: true, isPlain: true, value: ({ number }) => number },
    { key: "status", label: "Status", value: ({ status }) => status, node: ({ status }) => badge(status) },
    { key: "value", label: run.metric || "Value", isNumber: true, value: ({ value }) => value },
    ...parameterNames(run).map((name) => ({
      key: `param/${name}`,
      label: name,
      isNumber: isNumeric(run, name),
      isPlain: true,
      value: ({ params }) => params[name],
    })),
    { key: "best", label: "Best epoch", isNumber: true, isPlain: true, value: ({ bestEpoch }) => bestEpoch },
    { key: "epochs", label: "Epochs", isNumber: true, value: ({ values }) => values.length },
    {
      key: "seconds",
      label: "Time",
      isNumber: true,
      value: ({ seconds }) => seconds,
      text: ({ seconds }) => formatDuration(seconds),
    },
    { key: "worker", label: "Worker", isNumber: true, isPlain: true, value: ({ worker }) => worker },
    { key: "attempts", label: "Attempts", isNumber: true, value: ({ attempts }) => attempts },
  ];
}

function trialDetails(run) {
  return (trial) => {
    const traceback = el(
      "pre",
      { tabindex: "0", role: "region", "aria-label": `Traceback of trial ${trial.number}` },
      trial.traceback,
    );
    const values = trial.values.map(formatNumber).join(", ");
    return el(
      "div",
      { class: "detail" },
      trial.values.length > 1 && sparkline(trial.values, `${run.metric || "value"} by epoch`),
      values && el("p", {}, `${run.metric || "Values"} by epoch: ${values}`),
      trial.error && el("p", { class: "error" }, trial.error),
      trial.traceback && el("header", {}, el("h3", {}, "Traceback"), copyButton(traceback)),
      trial.traceback && traceback,
      !trial.values.length &&
        !trial.error &&
        !trial.traceback &&
        el("p", { class: "muted" }, "This trial has not reported anything yet."),
    );
  };
}

/** A small curve with its first, last and extreme values in words for screen readers. */
function sparkline(values, name) {
  const finite = values.filter(Number.isFinite);
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const place = (value, index) =>
    `${((index / (values.length - 1)) * 296 + 2).toFixed(1)} ${(58 - ((value - low) / (high - low || 1)) * 54).toFixed(1)}`;
  let isGap = true;
  const path = values
    .map((value, index) => {
      if (value === null) return "";
      if (!Number.isFinite(value)) {
        isGap = true;
        return "";
      }
      const command = isGap ? "M" : "L";
      isGap = false;
      return command + place(value, index);
    })
    .join("");
  const svg = document.createElementNS(SVG, "svg");
  for (const [attribute, value] of Object.entries({
    viewBox: "0 0 300 60",
    class: "sparkline",
    role: "img",
    "aria-label": `${name}: from ${formatNumber(values[0])} to ${formatNumber(values.at(-1))}`,
  }))
    svg.setAttribute(attribute, value);
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}
