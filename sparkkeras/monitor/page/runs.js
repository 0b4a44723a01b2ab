// The head of a run, the list of runs, and several runs side by side.

const KINDS = { fit: "Training", keras: "Training", search: "Search", ensemble: "Ensemble", function: "Function" };
const NOTHING_YET = {
  fit: "Curves appear here at the end of the first epoch.",
  search: "Trials appear here as soon as they begin.",
  ensemble: "Curves appear here when the first member is trained.",
  function: "Output appears here as soon as ranks start.",
};

/** Name, status, time and progress of one run. */
class RunHeader {
  #app;
  #name = el("h1");
  #status = el("span");
  #kind = el("span", { class: "muted" });
  #facts = el("dl", { class: "facts" });
  #phase = el("p", { class: "phase" });
  #resumed = el("p", { class: "phase" });
  #bar = el("div", { class: "bar", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100" }, el("span"));
  #share = el("span");
  #progress = el("div", { class: "progress" }, this.#bar, this.#share);
  #values = new Map(); // name of a fact -> <dd>

  constructor(app) {
    this.#app = app;
    this.element = el(
      "header",
      { class: "card head" },
      el("div", { class: "title" }, this.#name, this.#status, this.#kind),
      this.#facts,
      this.#progress,
      this.#phase,
      this.#resumed,
    );
  }

  update(run) {
    setText(this.#name, this.#app.runName(run));
    setText(this.#kind, KINDS[run.kind] ?? run.kind);
    if (this.#status.dataset.status !== run.status) {
      this.#status.dataset.status = run.status;
      this.#status.replaceChildren(badge(run.status));
    }
    this.#showFacts(headFacts(run, this.#app.sinceMessage(run)));
    this.#showProgress(run);
    setText(this.#phase, phaseOf(run));
    setText(this.#resumed, run.resumed.join(" "));
    for (const text of [this.#phase, this.#resumed]) text.hidden = !text.textContent;
  }

  #showFacts(facts) {
    const names = facts.map(([name]) => name);
    if (names.join() !== [...this.#values.keys()].join()) {
      this.#values = new Map(names.map((name) => [name, el("dd")]));
      this.#facts.replaceChildren(...[...this.#values].map(([name, value]) => el("div", {}, el("dt", {}, name), value)));
    }
    for (const [name, text] of facts) setText(this.#values.get(name), text);
  }

  #showProgress(run) {
    const [done, label] = progressOf(run);
    const rows = run.status === "running" ? run.progress?.rows : null; // of an epoch of unknown length
    this.#progress.hidden = done === null && !rows;
    this.#bar.hidden = done === null;
    if (done === null) return setText(this.#share, rows ? `${label}: ${plural(rows, "row")}` : "");
    setText(this.#share, `${label}: ${Math.floor(done * 100)} %`);
    this.#bar.firstElementChild.style.width = `${(done * 100).toFixed(1)}%`;
    this.#bar.setAttribute("aria-valuenow", String(Math.round(done * 100)));
    this.#bar.setAttribute("aria-label", label);
  }
}

/** What the driver does now, or what a run without anything to show will show. */
function phaseOf(run) {
  if (run.status !== "running") return "";
  if (run.phase) return `${run.phase} …`;
  const isEmpty = !run.history.size && !run.trials.size && !run.members.size && !run.ranks.size;
  return isEmpty ? (NOTHING_YET[run.kind] ?? NOTHING_YET.fit) : "";
}

/** The fraction that is complete, and of what: of the current epoch, the trials of a search, or the epochs of a function. */
function progressOf(run) {
  if (run.status !== "running") return [null, ""];
  if (run.trials.size && run.maxTrials) return [Math.min(1, endedTrials(run) / run.maxTrials), "Trials"];
  if (run.ranks.size && run.epochs) return [Math.min(1, run.position / run.epochs), "Epochs"];
  return run.progress ? [run.progress.done, `Epoch ${run.progress.epoch + 1}`] : [null, ""];
}

function endedTrials(run) {
  return trialsOf(run).filter(({ status }) => status !== "running").length;
}

function headFacts(run, sinceMessage) {
  const facts = hasTimes(run) ? [["Elapsed", formatDuration(elapsedSeconds(run, sinceMessage))]] : [];
  const left = secondsLeft(run, sinceMessage);
  if (left !== null) facts.push(["Left", formatDuration(left)]);
  if (run.kind === "search" || run.trials.size) facts.push(...searchFacts(run));
  else if (run.history.size || run.progress || (run.epochs && !run.members.size)) facts.push(["Epoch", epochText(run)]);
  if (run.workerCount) facts.push([run.kind === "function" ? "Ranks" : "Workers", formatNumber(run.workerCount)]);
  const isRunning = run.status === "running";
  const speed = isRunning ? run.progress?.rowsPerSecond : overallSpeed(run);
  if (speed) facts.push([`Rows per second (${isRunning ? "now" : "average"})`, formatNumber(Math.round(speed))]);
  facts.push(...lossFacts(run));
  if (run.members.size) facts.push(["Members", formatNumber(run.members.size)]);
  return facts;
}

/** The last loss, and the best validation loss with its epoch. */
function lossFacts(run) {
  const facts = [];
  const losses = curve(epochsOf(run), "loss");
  if (losses.length) facts.push(["Loss", formatNumber(lastOf(losses))]);
  const validation = curve(epochsOf(run), "val_loss");
  const best = bestOf(
    validation.map(([, y]) => y),
    true,
  );
  if (best) facts.push(["Best val_loss", `${formatNumber(best.value)} (epoch ${validation[best.index][0]})`]);
  return facts;
}

function searchFacts(run) {
  const best = bestTrial(run);
  const ended = formatNumber(endedTrials(run));
  const facts = [["Trials", run.maxTrials ? `${ended} of ${formatNumber(run.maxTrials)}` : ended]];
  if (best) facts.push([`Best ${run.metric || "value"}`, formatNumber(best.value)], ["Best trial", String(best.number)]);
  return facts;
}

function epochText(run) {
  const current =
    run.status === "running" && run.progress ? run.progress.epoch + 1 : epochsOf(run).at(-1)?.epoch + 1 || run.initialEpoch;
  if (!run.epochs) return formatNumber(current);
  const isEarly = run.status === "finished" && current < run.epochs;
  return `${formatNumber(current)} of ${formatNumber(run.epochs)}${isEarly ? " (stopped early)" : ""}`;
}

function overallSpeed(run) {
  const measured = epochsOf(run).filter(({ rows, seconds }) => rows && seconds);
  const total = (field) => measured.reduce((sum, entry) => sum + entry[field], 0);
  return measured.length ? total("rows") / total("seconds") : null;
}

/** The runs of the page, with checkboxes: those that are checked are shown. */
class RunList {
  #app;
  #rows = new Map(); // key of the run -> its elements
  #list = el("ul");

  constructor(app) {
    this.#app = app;
    this.element = el("section", { class: "card runs", "aria-label": "Runs", hidden: true }, this.#list);
  }

  update() {
    const runs = [...this.#app.state.runs.values()];
    this.element.hidden = runs.length < 2;
    if (this.element.hidden) return;
    const selected = new Set(this.#app.selectedRuns().map(({ key }) => key));
    for (const run of runs) this.#updateRow(run, selected.has(run.key));
    setChildren(
      this.#list,
      runs.map(({ key }) => this.#rows.get(key).element),
    );
  }

  #updateRow(run, isSelected) {
    if (!this.#rows.has(run.key)) this.#rows.set(run.key, this.#buildRow(run));
    const row = this.#rows.get(run.key);
    row.box.checked = isSelected;
    setText(row.name, this.#app.runName(run));
    row.only.setAttribute("aria-label", `Show only this run: ${this.#app.runName(run)}`);
    setText(
      row.about,
      [KINDS[run.kind] ?? run.kind, hasTimes(run) && formatClock(run.started, Date.now() / 1000), this.#app.sourceName(run)]
        .filter(Boolean)
        .join(" · "),
    );
    if (row.status.dataset.status !== run.status) {
      row.status.dataset.status = run.status;
      row.status.replaceChildren(badge(run.status));
    }
  }

  #buildRow(run) {
    const box = el("input", { type: "checkbox", on: { change: () => this.#app.select(run.key, box.checked) } });
    const name = el("b");
    const about = el("span", { class: "muted" });
    const status = el("span");
    const only = el(
      "button",
      {
        type: "button",
        class: "small",
        title: "Show only this run",
        on: { click: () => this.#app.selectOnly(run.key) },
      },
      "Only",
    );
    const mark = swatch(`var(--series-${this.#app.colourIndex(run) + 1})`, { dot: true });
    return {
      element: el("li", {}, el("label", {}, box, mark, el("span", {}, name, " ", about)), status, only),
      box,
      name,
      about,
      status,
      only,
    };
  }
}

/** Several runs: their curves in the same charts, and tables of their results and settings. */
class Comparison {
  #app;
  #title = el("h1");
  #toolbar;
  #grid;
  #results;
  #settings;
  #settingsPart;

  constructor(app) {
    this.#app = app;
    this.#toolbar = new Toolbar(app);
    this.#grid = new ChartGrid(app);
    this.#results = new DataTable(app, "compare/results", "Results");
    this.#settings = new DataTable(app, "compare/settings", "Settings that differ");
    this.#settingsPart = el("section", { class: "panel" }, el("h2", {}, "Settings that differ"), this.#settings.element);
    this.element = el(
      "div",
      { class: "compared" },
      this.#title,
      el("section", { class: "panel" }, el("h2", {}, "Results"), this.#results.element),
      el(
        "section",
        { class: "panel" },
        el("div", { class: "heading" }, el("h2", {}, "Curves"), this.#toolbar.element),
        this.#grid.element,
      ),
      this.#settingsPart,
    );
  }

  update(runs) {
    setText(this.#title, `${runs.length} runs compared`);
    this.#toolbar.update(runs.flatMap(epochsOf));
    this.#grid.update(this.#specs(runs));
    this.#showResults(runs);
    const settings = differingSettings(runs);
    this.#settingsPart.hidden = !settings.length;
    this.#settings.update(
      [
        { key: "setting", label: "Setting", value: ([name]) => name },
        ...runs.map((run, index) => ({ key: run.key, label: this.#app.runName(run), value: ([, texts]) => texts[index] })),
      ],
      settings,
      [settings, runs.map((run) => this.#app.runName(run))],
    );
  }

  dispose() {
    this.#grid.dispose();
  }

  #specs(runs) {
    const groups = metricGroups(runs.flatMap(epochsOf));
    const key = curveKey(
      this.#app,
      runs.map((run) => [run.key, run.name, run.versions.history, run.versions.trials]),
    );
    const specs = [...groups].map(([base, metrics]) => ({
      id: `compare/${base}`,
      title: base,
      key: key + metrics,
      figure: () =>
        this.#metricFigure(
          runs.filter(({ history }) => history.size),
          metrics,
        ),
    }));
    const searches = runs.filter(({ trials }) => trials.size);
    if (searches.length)
      specs.push({ id: "compare/best", title: "Best value so far", key, figure: () => this.#searchFigure(searches) });
    return specs;
  }

  #metricFigure(runs, metrics) {
    const colours = readColours();
    const colourOf = (run) => colours.series[this.#app.colourIndex(run)];
    const series = runs
      .flatMap((run) =>
        metrics.map((metric) => ({
          name: `${this.#app.runName(run)} ${labelOf(metric)}`,
          colour: colourOf(run),
          dashed: isValidation(metric),
          isSmoothed: true,
          points: curve(epochsOf(run), metric),
        })),
      )
      .filter(({ points }) => points.length);
    const legend = runs.map((run) => ({ name: this.#app.runName(run), colour: colourOf(run) }));
    return { ...lineFigure(series, { colours, view: this.#app.view }), legend: runLegend(legend, metrics) };
  }

  #searchFigure(runs) {
    const colours = readColours();
    const series = runs.map((run) => ({
      name: this.#app.runName(run),
      colour: colours.series[this.#app.colourIndex(run)],
      points: bestSoFar(run),
      step: "end",
    }));
    return lineFigure(series, { colours, view: this.#app.view, unit: "Trial" });
  }

  #showResults(all) {
    const runs = all.map((run) => ({ ...run })); // rows that are new, as a run is changed in place
    const metrics = [...new Set(runs.flatMap((run) => epochsOf(run).flatMap(({ logs }) => Object.keys(logs))))].filter(
      (name) => name !== "learning_rate",
    );
    const valuesOf = (run, metric) => curve(epochsOf(run), metric).map(([, y]) => y);
    const columns = metrics
      .flatMap((metric) => [
        { key: `${metric}/last`, label: metric, isNumber: true, value: (run) => valuesOf(run, metric).at(-1) },
        !metrics.includes(`val_${metric}`) && {
          key: `${metric}/best`,
          label: `best ${metric}`,
          isNumber: true,
          value: (run) => bestOf(valuesOf(run, metric), isMinimized(run, metric))?.value,
        },
      ])
      .filter(Boolean);
    if (runs.some(({ trials }) => trials.size)) {
      columns.unshift(
        { key: "trials", label: "Trials", isNumber: true, value: (run) => run.trials.size || null },
        { key: "value", label: "Best value", isNumber: true, value: (run) => bestTrial(run)?.value },
      );
    }
    this.#results.update(
      [
        {
          key: "run",
          label: "Run",
          value: (run) => this.#app.runName(run),
          node: (run) =>
            el(
              "span",
              { class: "run" },
              swatch(`var(--series-${this.#app.colourIndex(run) + 1})`, { dot: true }),
              this.#app.runName(run),
            ),
        },
        { key: "status", label: "Status", value: ({ status }) => status, node: ({ status }) => badge(status) },
        runs.some(hasTimes) && {
          key: "time",
          label: "Time",
          isNumber: true,
          value: (run) => elapsedSeconds(run, 0),
          text: (run) => formatDuration(elapsedSeconds(run, 0)),
        },
        { key: "epochs", label: "Epochs", isNumber: true, value: ({ history }) => history.size || null },
        ...columns,
      ].filter(Boolean),
      runs,
      runs.map((run) => [this.#app.runName(run), run.versions.head]),
    );
  }
}
