// The page: what is selected and shown, messages from the server or from files, and one rendering for each frame at most.

const POLL_SECONDS = 1;
const HIDDEN_SECONDS = 10;
const LONGEST_WAIT = 10;
const ANSWER_SECONDS = 20; // within which a server answers that is there
const PANELS = [
  ErrorPanel,
  MetricsPanel,
  MembersPanel,
  SearchPanel,
  TrialsPanel,
  RanksPanel,
  SpeedPanel,
  IncidentsPanel,
  CheckpointsPanel,
  SettingsPanel,
];

const VIEW = `sparkkeras-view ${location.pathname}`; // saved files share one storage
const DEFAULT_VIEW = {
  selected: null, // keys of runs; null for the newest run of this page, or all of them if its data says so
  smoothing: 0,
  log: false,
  from: null, // the epochs that charts show, from 1
  to: null,
  staleness: "total",
  asTable: {}, // chart -> whether it is shown as a table
  orders: {}, // table -> how it is sorted
  filters: {}, // run -> filters of its trials
  expanded: {}, // rows that show their details
  ranks: {}, // run -> the rank whose output is shown
  scroll: 0,
};

/** A value of a storage of the browser, which may be full or forbidden. */
function load(storage, key) {
  try {
    return JSON.parse(globalThis[storage].getItem(key));
  } catch {
    return null;
  }
}

function store(storage, key, value) {
  try {
    globalThis[storage].setItem(key, JSON.stringify(value));
  } catch {
    // The page works without: only a reload forgets.
  }
}

/** One run and its panels. */
class RunView {
  constructor(app, run) {
    this.header = new RunHeader(app);
    this.panels = PANELS.map((Kind) => new Kind(app, run));
    this.element = el("div", {}, this.header.element, ...this.panels.map(({ element }) => element));
  }

  update([run]) {
    this.header.update(run);
    for (const panel of this.panels) panel.update(run);
  }

  dispose() {
    for (const panel of this.panels) panel.dispose();
  }
}

class App {
  state = emptyState();
  view = { ...structuredClone(DEFAULT_VIEW), ...load("sessionStorage", VIEW) };
  theme = "light";
  isPrinting = false; // charts are drawn then that are not on the screen
  brushed = new Map(); // run -> numbers of the trials selected in its parallel coordinates
  #sources = new Map([["", ""]]); // prefix of the keys of runs -> name of the file
  #isAllSelected = false; // until the reader selects runs, instead of the newest one
  #lastMessageAt = null; // in seconds of performance.now(); null without a server
  #scroll = 0; // where a reload began; the page has to grow first
  #isScheduled = false;
  #shown = ""; // keys of the runs that the content is for
  #content = null;
  #statuses = new Map();
  #list = new RunList(this);
  #main = document.getElementById("main");
  #announcer = document.getElementById("announcer");
  #place = el("div");
  #empty = el("p", { class: "card empty" });

  start() {
    this.#main.append(this.#list.element, this.#place, this.#empty);
    addEventListener("pagehide", () => this.#save());
    history.scrollRestoration = "manual";
    this.#scroll = this.view.scroll;
    addEventListener("wheel", () => (this.#scroll = 0), { passive: true });
    const data = JSON.parse(document.getElementById("data").textContent);
    setText(this.#empty, data ? "This file has no runs." : "Waiting for a run. It appears here as soon as it begins.");
    this.#isAllSelected = data?.select === "all";
    if (data) this.receive(data.messages ?? []);
    else new Poller(this).start();
    this.#render();
    setInterval(() => this.#lastMessageAt !== null && this.#schedule(), 1000);
  }

  // --- messages

  receive(messages, source = "") {
    for (const message of messages) reduce(this.state, message, source);
    this.#announce();
    this.#schedule();
  }

  /** Add the runs of another file, and show them beside those that are shown. */
  open(name, messages) {
    const known = [...this.#sources.values()].filter((other) => other === name).length;
    const source = `${name}${known ? ` (${known + 1})` : ""}/`;
    const selected = this.selectedRuns().map(({ key }) => key);
    this.#sources.set(source, name);
    this.receive(messages, source);
    const opened = [...this.state.runs.values()].filter((run) => run.source === source).map(({ key }) => key);
    this.view.selected = [...selected, ...opened];
    this.changed();
    return opened.length;
  }

  /** Whether the server has reported runs and the end of each. */
  haveAllEnded() {
    const runs = [...this.state.runs.values()].filter(({ source }) => source === "");
    return runs.length > 0 && runs.every(({ status }) => status !== "running");
  }

  /** @param {number | null} age of the server's last message in seconds, if it has answered */
  connected(age) {
    this.#lastMessageAt = age === null ? null : performance.now() / 1000 - age;
  }

  /** Seconds since the last message, which is one of the run that continues, while the server answers. */
  sinceMessage(run) {
    if (this.#lastMessageAt === null || run.source !== "" || run.status !== "running") return 0;
    return Math.max(0, performance.now() / 1000 - this.#lastMessageAt);
  }

  // --- runs

  selectedRuns() {
    const runs = [...this.state.runs.values()];
    const chosen = runs.filter(({ key }) => this.view.selected?.includes(key));
    if (chosen.length || this.view.selected?.length === 0) return chosen;
    return this.#isAllSelected ? runs : runs.slice(-1);
  }

  select(key, isSelected) {
    const keys = this.selectedRuns()
      .map((run) => run.key)
      .filter((other) => other !== key);
    this.view.selected = isSelected ? [...keys, key] : keys;
    this.changed();
  }

  selectOnly(key) {
    this.view.selected = [key];
    this.changed();
  }

  colourIndex(run) {
    return [...this.state.runs.keys()].indexOf(run.key) % 8;
  }

  /** The name of a run, with what tells it from others of the same name. */
  runName({ key, name }) {
    const same = [...this.state.runs.values()].filter((run) => run.name === name).map((run) => run.key);
    return same.length > 1 ? `${name} #${same.indexOf(key) + 1}` : name;
  }

  sourceName(run) {
    return this.#sources.get(run.source);
  }

  // --- view

  zoom(from, to) {
    Object.assign(this.view, { from, to });
    this.changed();
  }

  brush(run, numbers) {
    if (numbers) this.brushed.set(run.key, new Set(numbers));
    else this.brushed.delete(run.key);
    this.changed();
  }

  setTheme(theme) {
    this.theme = theme;
    document.documentElement.dataset.theme = this.shownTheme;
    this.#schedule();
  }

  /** Show everything as it is printed, or as it was before. At once: the browser lays the paper out when this returns. */
  setPrinting(isPrinting) {
    this.isPrinting = isPrinting;
    document.documentElement.classList.toggle("printing", isPrinting);
    document.documentElement.dataset.theme = this.shownTheme;
    this.#render();
  }

  /** Paper is light. */
  get shownTheme() {
    return this.isPrinting ? "light" : this.theme;
  }

  /** The view has changed: keep it and draw it. */
  changed() {
    this.#save();
    this.#schedule();
  }

  announce(text) {
    setText(this.#announcer, text);
  }

  #save() {
    store("sessionStorage", VIEW, { ...this.view, scroll: scrollY });
  }

  /** Tell screen readers of changes of status, not of each number. */
  #announce() {
    const changes = [];
    for (const run of this.state.runs.values()) {
      if (this.#statuses.get(run.key) !== run.status) changes.push(`${run.name}: ${run.status}`);
      this.#statuses.set(run.key, run.status);
    }
    if (changes.length) this.announce(changes.join(". "));
  }

  // --- rendering

  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    requestAnimationFrame(() => {
      this.#isScheduled = false;
      this.#render();
    });
  }

  #render() {
    const runs = this.selectedRuns();
    this.#empty.hidden = runs.length > 0;
    if (this.state.runs.size) setText(this.#empty, "Select the runs to show.");
    this.#list.update();
    const shown = JSON.stringify(runs.map(({ key }) => key));
    if (shown !== this.#shown) this.#show(shown, runs);
    this.#content?.update(runs);
    document.title = titleOf(runs);
    this.#restoreScroll();
  }

  #restoreScroll() {
    if (!this.#scroll || document.documentElement.scrollHeight < this.#scroll + innerHeight) return;
    scrollTo(0, this.#scroll);
    this.#scroll = 0;
  }

  #show(shown, runs) {
    this.#shown = shown;
    this.#content?.dispose();
    this.#content = runs.length > 1 ? new Comparison(this) : runs.length ? new RunView(this, runs[0]) : null;
    this.#place.replaceChildren(...(this.#content ? [this.#content.element] : []));
  }
}

function titleOf(runs) {
  if (runs.length !== 1) return "sparkkeras monitor";
  const [run] = runs;
  const state =
    run.status === "running" && run.progress && run.epochs ? `${run.progress.epoch + 1}/${run.epochs}` : run.status;
  return `${state} · ${run.name}`;
}

/** Asks the server for messages, until the page is closed. */
class Poller {
  #app;
  #next = 0;
  #server = null;
  #failures = 0;
  #lostAt = null;
  #timer = null;
  #isAsking = false;
  #note = document.getElementById("connection");

  constructor(app) {
    this.#app = app;
  }

  start() {
    document.addEventListener("visibilitychange", () => document.hidden || this.#poll());
    this.#poll();
  }

  async #poll() {
    if (this.#isAsking) return;
    clearTimeout(this.#timer);
    this.#isAsking = true;
    try {
      let answer;
      do {
        answer = await this.#ask();
        if (!answer) return;
        this.#next = answer.next;
        this.#app.receive(answer.messages);
        this.#found(answer.age);
      } while (answer.more);
    } catch {
      this.#lost();
    } finally {
      this.#isAsking = false;
      this.#timer = setTimeout(() => this.#poll(), 1000 * (document.hidden ? HIDDEN_SECONDS : this.#wait()));
    }
  }

  /** The seconds until the next request. */
  #wait() {
    if (!this.#failures) return POLL_SECONDS;
    return this.#app.haveAllEnded() ? LONGEST_WAIT : Math.min(LONGEST_WAIT, 2 ** (this.#failures - 1));
  }

  /** The next messages, or null if another server answers, whose page is loaded then. */
  async #ask() {
    const signal = AbortSignal.timeout(1000 * ANSWER_SECONDS);
    const response = await fetch(`messages?after=${this.#next}`, { cache: "no-store", signal });
    if (!response.ok) throw new Error(`status ${response.status}`);
    const answer = await response.json();
    if (this.#server !== null && answer.server !== this.#server) {
      location.reload();
      return null;
    }
    this.#server = answer.server;
    return answer;
  }

  #found(age) {
    this.#failures = 0;
    this.#lostAt = null;
    this.#note.hidden = true;
    this.#app.connected(age);
  }

  #lost() {
    this.#failures += 1;
    this.#lostAt ??= Date.now() / 1000;
    setText(
      this.#note,
      this.#app.haveAllEnded()
        ? "The server has ended. This page shows what it had reported."
        : `Connection lost since ${formatClock(this.#lostAt)}, trying again`,
    );
    this.#note.hidden = false;
    this.#app.connected(null);
  }
}

/** The button and the dropping of saved files. */
class FileOpener {
  #app;
  #input = document.getElementById("files");
  #note = document.getElementById("file-note");

  constructor(app) {
    this.#app = app;
  }

  start() {
    document.getElementById("open").addEventListener("click", () => this.#input.click());
    this.#input.addEventListener("change", async () => {
      await this.#open([...this.#input.files]);
      this.#input.value = "";
    });
    addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      document.body.classList.add("dropping");
    });
    addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("dropping"));
    addEventListener("drop", (event) => {
      document.body.classList.remove("dropping");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.#open([...event.dataTransfer.files]);
    });
  }

  async #open(files) {
    const failed = [];
    for (const file of files) {
      try {
        this.#app.open(file.name, messagesOf(await file.text()));
      } catch {
        failed.push(file.name);
      }
    }
    const text = failed.length ? `No saved page of sparkkeras: ${failed.join(", ")}` : "";
    setText(this.#note, text);
    this.#note.hidden = !text;
    this.#app.announce(text || `${plural(files.length, "file")} opened`);
  }
}

/** The messages of a saved page. Parsed documents run no scripts. */
function messagesOf(html) {
  const data = new DOMParser().parseFromString(html, "text/html").getElementById("data");
  return JSON.parse(data.textContent).messages;
}

/** Light or dark: as the system has it until the reader chooses. */
function startTheme(app) {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = load("localStorage", "sparkkeras-theme");
  const apply = () => {
    const theme = chosen ?? (system.matches ? "dark" : "light");
    setText(button, theme === "dark" ? "Light mode" : "Dark mode");
    app.setTheme(theme);
  };
  button.addEventListener("click", () => {
    chosen = app.theme === "dark" ? "light" : "dark";
    store("localStorage", "sparkkeras-theme", chosen);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

/** Printing begins with an event in most browsers, in others only with a change of the media. */
function startPrinting(app) {
  const media = matchMedia("print");
  const set = (isPrinting) => isPrinting !== app.isPrinting && app.setPrinting(isPrinting);
  addEventListener("beforeprint", () => set(true));
  addEventListener("afterprint", () => set(false));
  media.addEventListener("change", () => set(media.matches));
}

const app = new App();
startTheme(app);
startPrinting(app);
new FileOpener(app).start();
app.start();
