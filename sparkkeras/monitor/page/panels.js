// The parts of a page about one run. Each panel shows itself only if the run has something for it, so that what a run shows
// depends on its messages and not on its kind.

const INCIDENTS = {
  retry: ["again", "Task retried"],
  repair: ["again", "Rows read again"],
  takeover: ["again", "Worker replaced"],
  restart: ["again", "Workers restarted"],
  executor: ["stopped", "Executors changed"],
  warning: ["warning", "Warning"],
};
const LINES = 4; // workers up to which each gets a line; more are a heat map
const WIDE = 16; // workers above which the heat map is as wide as the page

class Panel {
  /** @param {Element[]} controls beside the title */
  constructor(app, title, ...controls) {
    this.app = app;
    this.element = el(
      "section",
      { class: "panel", hidden: true },
      el("div", { class: "heading" }, el("h2", {}, title), ...controls),
    );
  }

  /** Show the panel if there is something in it. */
  show(isFilled) {
    this.element.hidden = !isFilled;
    return isFilled;
  }

  dispose() {
    this.grid?.dispose();
  }
}

/** The parts of the view that change how curves are drawn. */
function curveKey(app, ...versions) {
  const { smoothing, log, from, to } = app.view;
  return JSON.stringify([versions, smoothing, log, from, to]);
}

/** The same for charts that are neither smoothed nor on a log scale. */
function rangeKey(app, ...versions) {
  return JSON.stringify([versions, app.view.from, app.view.to]);
}

/** Whether a metric has other values than its first one. */
function varies(points) {
  return points.some(([, y]) => y !== points[0][1]);
}

/** The name of a metric within the chart of its base: "training", "validation", and which item of a list. */
function labelOf(metric) {
  const item = metric.match(/(\[\d+\])+$/)?.[0] ?? "";
  return `${isValidation(metric) ? "validation" : "training"}${item && ` ${item}`}`;
}

/** A panel of charts over epochs with the toolbar for them. */
class CurvesPanel extends Panel {
  constructor(app, title) {
    const toolbar = new Toolbar(app);
    super(app, title, toolbar.element);
    this.toolbar = toolbar;
    this.grid = new ChartGrid(app);
    this.element.append(this.grid.element);
  }
}

class MetricsPanel extends CurvesPanel {
  constructor(app) {
    super(app, "Metrics");
  }

  update(run) {
    if (!this.show(run.history.size > 0)) return;
    const entries = epochsOf(run);
    this.toolbar.update(entries);
    const specs = [...metricGroups(entries)].map(([base, metrics]) => this.#metricSpec(run, entries, base, metrics));
    const rates = curve(entries, "learning_rate");
    if (rates.length && varies(rates)) specs.push(this.#rateSpec(run, rates));
    this.grid.update(specs);
  }

  #metricSpec(run, entries, base, metrics) {
    return {
      id: `${run.key}/metric/${base}`,
      title: base,
      key: curveKey(this.app, run.versions.history, run.versions.incidents, metrics),
      figure: () => {
        const colours = readColours();
        const items = [...new Set(metrics.map((metric) => metric.replace(/^val_/, "")))];
        const series = metrics.map((metric) => ({
          name: labelOf(metric),
          colour:
            colours.series[items.length > 1 ? items.indexOf(metric.replace(/^val_/, "")) % 8 : Number(isValidation(metric))],
          dashed: isValidation(metric),
          isSmoothed: true,
          points: curve(entries, metric),
        }));
        return lineFigure(series, { colours, view: this.app.view, marks: marksOf(run) });
      },
    };
  }

  #rateSpec(run, points) {
    return {
      id: `${run.key}/rate`,
      title: "learning_rate",
      key: curveKey(this.app, run.versions.history),
      figure: () => {
        const colours = readColours();
        return lineFigure([{ name: "learning rate", colour: colours.series[4], points, step: "end" }], {
          colours,
          view: this.app.view,
        });
      },
    };
  }
}

/** Where incidents are on the axis of epochs. */
function marksOf(run) {
  const first = epochsOf(run)[0].epoch + 1;
  return [...new Set(run.incidents.map(({ position }) => Math.max(first, Math.round(position * 100) / 100)))];
}

class MembersPanel extends CurvesPanel {
  constructor(app, run) {
    super(app, "Members");
    this.table = new DataTable(app, `${run.key}/members`, "Members");
    this.element.append(this.table.element);
  }

  update(run) {
    if (!this.show(run.members.size > 0)) return;
    const members = [...run.members].sort(([one], [other]) => one - other);
    const all = members.flatMap(([, entries]) => entries);
    this.toolbar.update(all);
    this.#showResults(run, members, all);
    const groups = metricGroups(all);
    this.grid.update(
      [...groups].map(([base, metrics]) => ({
        id: `${run.key}/member/${base}`,
        title: base,
        key: curveKey(this.app, run.versions.members, metrics),
        figure: () => this.#figure(members, metrics),
      })),
    );
  }

  /** The last and the best value of each metric. */
  #showResults(run, members, all) {
    const metrics = [...metricGroups(all).values()].flat();
    const valuesOf = ({ entries }, metric) => curve(entries, metric).map(([, y]) => y);
    this.table.update(
      [
        { key: "member", label: "Member", isNumber: true, isPlain: true, value: ({ member }) => member },
        { key: "epochs", label: "Epochs", isNumber: true, value: ({ entries }) => entries.length },
        ...metrics.flatMap((metric) => [
          { key: `${metric}/last`, label: `last ${metric}`, isNumber: true, value: (row) => valuesOf(row, metric).at(-1) },
          {
            key: `${metric}/best`,
            label: `best ${metric}`,
            isNumber: true,
            value: (row) => bestOf(valuesOf(row, metric), isMinimized(run, metric))?.value,
          },
        ]),
      ],
      members.map(([member, entries]) => ({ member, entries })),
      run.versions.members,
    );
  }

  #figure(members, metrics) {
    const colours = readColours();
    const series = members.flatMap(([member, entries], index) =>
      metrics.map((metric) => ({
        name: `member ${member} ${labelOf(metric)}`,
        colour: colours.series[index % 8],
        dashed: isValidation(metric),
        isSmoothed: true,
        points: curve(entries, metric),
      })),
    );
    return {
      ...lineFigure(series, { colours, view: this.app.view }),
      legend: runLegend(
        members.map(([member], index) => ({
          name: `member ${member}`,
          colour: colours.series[index % 8],
        })),
        metrics,
      ),
    };
  }
}

/** A legend that names each run once, and explains the dashes if there are some. */
function runLegend(entries, metrics) {
  return metrics.some(isValidation) ? [...entries, { name: "dashed: validation" }] : entries;
}

class SpeedPanel extends Panel {
  constructor(app) {
    super(app, "Speed");
    this.slow = el("ul", { class: "warnings" });
    this.grid = new ChartGrid(app);
    this.which = el(
      "select",
      {
        class: "small",
        "aria-label": "Epochs of the histogram",
        on: {
          change: () => {
            app.view.staleness = this.which.value;
            app.changed();
          },
        },
      },
      el("option", { value: "total" }, "all epochs"),
      el("option", { value: "last" }, "last epoch"),
    );
    this.element.append(this.slow, this.grid.element);
  }

  update(run) {
    const speeds = epochsOf(run)
      .filter(({ rows, seconds }) => rows && seconds)
      .map(({ epoch, rows, seconds }) => [epoch + 1, rows / seconds]);
    if (!this.show(speeds.length || run.workers.size || run.updates.size)) return;
    this.#showSlow(run);
    this.which.value = this.app.view.staleness;
    const specs = [];
    if (speeds.length)
      specs.push(this.#spec(run, "rows", "Rows per second", run.versions.history, ["rows per second", speeds]));
    if (run.updates.size) specs.push(...this.#updateSpecs(run));
    if (run.workers.size) specs.push(this.#workersSpec(run));
    this.grid.update(specs);
  }

  #showSlow(run) {
    const key = String(run.versions.workers);
    if (this.slow.dataset.key === key) return;
    this.slow.dataset.key = key;
    const workers = workersOf(run);
    const slow = workers.filter(({ isSlow }) => isSlow).sort((one, other) => other.ratio - one.ratio);
    const others = (worker) =>
      workers.length > 2 ? "the others" : `worker ${workers.find((other) => other.worker !== worker).worker}`;
    const items = slow
      .slice(0, 5)
      .map(({ worker, ratio }) =>
        el("li", {}, icon("warning"), `Worker ${worker} takes ${ratio.toFixed(1)} times as long as ${others(worker)}.`),
      );
    if (slow.length > 5) items.push(el("li", {}, icon("warning"), `${slow.length - 5} more workers are slow.`));
    this.slow.replaceChildren(...items);
    this.slow.hidden = !items.length;
  }

  #spec(run, name, title, version, ...lines) {
    return {
      id: `${run.key}/${name}`,
      title,
      height: 180,
      key: rangeKey(this.app, version),
      figure: () => {
        const colours = readColours();
        const series = lines.map(([label, points], index) => ({
          name: label,
          colour: colours.series[index],
          dashed: index > 0,
          points,
        }));
        const figure = lineFigure(series, { colours, view: this.app.view, isLog: false, fromZero: true });
        return { ...figure, legend: figure.legend.map((entry) => ({ ...entry, name: `${entry.name}, last epoch` })) };
      },
    };
  }

  #workersSpec(run) {
    const workers = workersOf(run);
    const isMap = workers.length > LINES;
    return {
      id: `${run.key}/workers${isMap ? "-map" : ""}`,
      title: "Seconds per epoch of each worker",
      isWide: workers.length > WIDE,
      height: isMap ? Math.min(400, Math.max(180, 60 + 6 * workers.length)) : 180,
      key: isMap ? String(run.versions.workers) : rangeKey(this.app, run.versions.workers),
      figure: () => (isMap ? heatFigure(workers, { colours: readColours() }) : this.#workerLines(workers)),
    };
  }

  #workerLines(workers) {
    const colours = readColours();
    const series = workers.map(({ worker, points, isSlow }, index) => ({
      name: isSlow ? `worker ${worker} (slow)` : `worker ${worker}`,
      colour: isSlow ? colours.bad : colours.series[[0, 2, 3, 4, 5, 6, 7][index % 7]],
      width: isSlow ? 3 : 1.5,
      points,
    }));
    return lineFigure(series, { colours, view: this.app.view, isLog: false, fromZero: true, format: formatDuration });
  }

  #updateSpecs(run) {
    const epochs = [...run.updates].sort(([one], [other]) => one - other);
    const points = (field) => epochs.map(([epoch, entry]) => [epoch + 1, entry[field]]);
    const { staleness } = this.app.view;
    return [
      this.#spec(run, "updates", "Updates per second", run.versions.updates, ["updates per second", points("perSecond")]),
      this.#spec(
        run,
        "staleness",
        "Staleness by epoch",
        run.versions.updates,
        ["mean", points("mean")],
        ["maximum", points("max")],
      ),
      {
        id: `${run.key}/histogram`,
        title: "Updates by staleness",
        height: 180,
        controls: [this.which],
        key: JSON.stringify([run.versions.updates, staleness]),
        figure: () =>
          barFigure(stalenessBars(run, staleness), { colours: readColours(), unit: "Staleness", name: "updates" }),
      },
    ];
  }
}

class IncidentsPanel extends Panel {
  constructor(app, run) {
    super(app, "What Spark did");
    this.table = new DataTable(app, `${run.key}/incidents`, "Incidents");
    this.element.append(this.table.element);
  }

  update(run) {
    if (!this.show(run.incidents.length > 0)) return;
    this.table.update(
      [
        { key: "time", label: "Time", value: ({ time }) => time, text: ({ time }) => formatClock(time, run.started) },
        {
          key: "after",
          label: "After",
          isNumber: true,
          value: ({ time }) => time,
          text: ({ time }) => formatDuration(time - run.started),
        },
        {
          key: "epoch",
          label: "Epoch",
          isNumber: true,
          value: ({ position }) => position,
          text: ({ position }) => String(Math.floor(position) + 1),
        },
        { key: "kind", label: "Kind", value: ({ kind }) => kind, node: ({ kind }) => incidentBadge(kind) },
        { key: "text", label: "What happened", value: ({ text }) => text },
      ],
      run.incidents,
      run.versions.incidents,
    );
  }
}

function incidentBadge(kind) {
  const [name, text] = Object.hasOwn(INCIDENTS, kind) ? INCIDENTS[kind] : ["warning", kind];
  return el("span", { class: `badge badge-${kind === "warning" ? "warning" : "incident"}` }, icon(name), text);
}

class CheckpointsPanel extends Panel {
  constructor(app, run) {
    super(app, "Checkpoints");
    this.table = new DataTable(app, `${run.key}/checkpoints`, "Checkpoints");
    this.element.append(this.table.element);
  }

  update(run) {
    if (!this.show(run.checkpoints.length > 0)) return;
    this.table.update(
      [
        { key: "time", label: "Time", value: ({ time }) => time, text: ({ time }) => formatClock(time, run.started) },
        {
          key: "epoch",
          label: "Continues with epoch",
          isNumber: true,
          value: ({ epoch }) => epoch,
          text: ({ epoch }) => formatPlain(epoch === null ? null : epoch + 1),
        },
        {
          key: "seconds",
          label: "Written in",
          isNumber: true,
          value: ({ seconds }) => seconds,
          text: ({ seconds }) => formatDuration(seconds),
        },
        { key: "path", label: "Path", value: ({ path }) => path, node: ({ path }) => el("code", {}, path) },
      ],
      run.checkpoints,
      run.versions.checkpoints,
    );
  }
}

class SettingsPanel extends Panel {
  constructor(app) {
    super(app, "Settings");
    this.list = el("dl", { class: "card settings" });
    this.element.append(this.list);
  }

  update(run) {
    const settings = Object.entries(run.settings);
    if (!this.show(settings.length > 0)) return;
    const key = String(run.versions.settings);
    if (this.list.dataset.key === key) return;
    this.list.dataset.key = key;
    this.list.replaceChildren(
      ...settings.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, formatExact(value)))),
    );
  }
}

class ErrorPanel extends Panel {
  constructor(app) {
    super(app, "Error");
    this.text = el("p", { class: "error" });
    this.traceback = el("pre", { tabindex: "0", role: "region", "aria-label": "Traceback" });
    this.details = el("div", {}, el("header", {}, el("h3", {}, "Traceback"), copyButton(this.traceback)), this.traceback);
    this.element.append(el("div", { class: "card failure" }, this.text, this.details));
  }

  update(run) {
    if (!this.show(Boolean(run.error || run.traceback))) return;
    setText(this.text, run.error);
    setText(this.traceback, run.traceback);
    this.details.hidden = !run.traceback;
  }
}

class RanksPanel extends Panel {
  #key = "";

  constructor(app, run) {
    super(app, "Ranks");
    this.run = run;
    this.list = el("fieldset", { class: "ranks" }, el("legend", { class: "hidden" }, "Output of rank"));
    this.heading = el("h3");
    this.output = el("pre", { tabindex: "0", role: "region", "aria-label": "Output" });
    this.reports = new DataTable(app, `${run.key}/reports`, "Metrics of the ranks");
    this.element.append(
      this.reports.element,
      el(
        "div",
        { class: "card split" },
        this.list,
        el("div", { class: "output" }, el("header", {}, this.heading, copyButton(this.output)), this.output),
      ),
    );
  }

  update(run) {
    if (!this.show(run.ranks.size > 0)) return;
    const ranks = [...run.ranks.values()].sort((one, other) => one.rank - other.rank);
    const first = ranks.find(({ state }) => state === "failed") ?? ranks[0];
    const chosen = this.app.view.ranks[run.key] ?? first.rank;
    const key = JSON.stringify([run.versions.ranks, chosen]);
    if (key === this.#key) return;
    this.#key = key;
    const focused = document.activeElement?.name === `rank/${run.key}`;
    this.list.replaceChildren(this.list.firstElementChild, ...ranks.map((rank) => this.#choice(rank, rank.rank === chosen)));
    if (focused) this.list.querySelector(":checked")?.focus();
    this.#showReports(run, ranks);
    this.#showOutput(run.ranks.get(chosen));
  }

  /** The last metrics that each rank has reported, if one has. */
  #showReports(run, all) {
    const ranks = all.map((rank) => ({ ...rank })); // rows that are new, as a rank is changed in place
    this.reports.element.hidden = ranks.every(({ epoch }) => epoch === null);
    const metrics = [...new Set(ranks.flatMap(({ logs }) => Object.keys(logs)))];
    this.reports.update(
      [
        { key: "rank", label: "Rank", isNumber: true, isPlain: true, value: ({ rank }) => rank },
        { key: "host", label: "Host", value: ({ host }) => host },
        {
          key: "epoch",
          label: "Epoch",
          isNumber: true,
          isPlain: true,
          value: ({ epoch }) => (epoch === null ? null : epoch + 1),
        },
        ...metrics.map((name) => ({ key: `log/${name}`, label: name, isNumber: true, value: ({ logs }) => logs[name] })),
      ],
      ranks,
      [run.versions.ranks, metrics],
    );
  }

  #choice({ rank, state, host }, isChosen) {
    const radio = el("input", { type: "radio", name: `rank/${this.run.key}` });
    radio.checked = isChosen;
    radio.addEventListener("change", () => {
      this.app.view.ranks[this.run.key] = rank;
      this.app.changed();
    });
    const name = state === "started" ? "running" : state;
    return el("label", {}, radio, el("b", {}, `Rank ${rank}`), state && badge(name), el("span", { class: "muted" }, host));
  }

  /** The last lines, scrolled to the end unless the reader has scrolled up. */
  #showOutput(rank) {
    if (!rank) return;
    const { output } = this;
    const isAtEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 20;
    setText(this.heading, `Output of rank ${rank.rank}`);
    setText(
      output,
      (rank.omitted ? `(${plural(rank.omitted, "earlier line")} not kept)\n` : "") +
        (rank.lines.join("\n") || "No output yet."),
    );
    if (isAtEnd) output.scrollTop = output.scrollHeight;
  }
}

/** Smoothing, log scale and the epochs that are shown: for all charts at once. */
class Toolbar {
  #app;
  #smoothing = el("input", { type: "range", min: "0", max: "0.99", step: "0.01" });
  #shown = el("output");
  #log = el("input", { type: "checkbox" });
  #from = el("input", { type: "number", min: "1", placeholder: "first", "aria-label": "First epoch shown" });
  #to = el("input", { type: "number", min: "1", placeholder: "last", "aria-label": "Last epoch shown" });
  #reset = el("button", { type: "button", class: "small" }, "All epochs");
  #note = el("span", { class: "note", role: "status", hidden: true });

  constructor(app) {
    this.#app = app;
    this.element = el(
      "div",
      { class: "toolbar", role: "group", "aria-label": "Charts" },
      el("label", {}, "Smoothing", this.#smoothing, this.#shown),
      el("label", {}, this.#log, "Log scale"),
      el("span", { class: "range" }, "Epochs", this.#from, "to", this.#to, this.#reset),
      this.#note,
      el("span", { class: "muted hint" }, "Drag in a chart to select epochs"),
    );
    this.#smoothing.addEventListener("input", () => this.#change({ smoothing: Number(this.#smoothing.value) }));
    this.#log.addEventListener("change", () => this.#change({ log: this.#log.checked }));
    for (const input of [this.#from, this.#to]) {
      input.addEventListener("change", () => app.zoom(Number(this.#from.value) || null, Number(this.#to.value) || null));
    }
    this.#reset.addEventListener("click", () => app.zoom(null, null));
  }

  /** @param {{epoch: number}[]} entries of which the charts have the metrics */
  update(entries) {
    const { smoothing, log, from, to } = this.#app.view;
    const epochs = entries.map(({ epoch }) => epoch + 1);
    const [first, last] = [epochs.reduce((a, b) => Math.min(a, b), Infinity), epochs.reduce((a, b) => Math.max(a, b), 0)];
    const { note } = epochs.length ? shownEpochs(this.#app.view, first, last) : { note: "" };
    setText(this.#note, note);
    this.#note.hidden = !note;
    this.#smoothing.value = String(smoothing);
    setText(this.#shown, smoothing.toFixed(2));
    this.#log.checked = log;
    if (document.activeElement !== this.#from) this.#from.value = from ?? "";
    if (document.activeElement !== this.#to) this.#to.value = to ?? "";
    this.#reset.hidden = from === null && to === null;
  }

  #change(values) {
    Object.assign(this.#app.view, values);
    this.#app.changed();
  }
}
