// The state of all runs, computed from messages in their order. Nothing here knows of the document or of the time.

const LAST_LINES = 2000; // of the output of a rank
const LIST_ITEMS = 16; // of a metric that is a list; each becomes a curve

/** @returns {{runs: Map<string, object>}} the state before the first message */
function emptyState() {
  return { runs: new Map() };
}

/**
 * Applies a message to the state. Messages of unknown types change nothing.
 *
 * @param {{runs: Map<string, object>}} state changed in place: a copy for each message would make long runs slow
 * @param {object} message
 * @param {string} source where the message is from; runs of different sources are different runs
 */
function reduce(state, message, source = "") {
  if (!message || !Object.hasOwn(REDUCERS, message.type)) return;
  const key = `${source}${message.run}`;
  if (!state.runs.has(key)) state.runs.set(key, emptyRun(key, source, message));
  const run = state.runs.get(key);
  REDUCERS[message.type](run, message);
  run.updated = Math.max(run.updated, message.time || 0);
  touch(run, "head");
}

function emptyRun(key, source, message) {
  return {
    key,
    source,
    id: String(message.run),
    started: message.time || 0,
    updated: message.time || 0,
    kind: "fit",
    name: String(message.run),
    settings: {},
    epochs: null,
    initialEpoch: 0,
    metric: "",
    minimizes: true,
    maxTrials: null,
    parameters: [],
    status: "running",
    seconds: null,
    error: "",
    traceback: "",
    phase: "",
    resumed: [],
    workerCount: null,
    progress: null,
    position: 0, // in epochs, with the fraction of the current one
    history: new Map(), // epoch -> {epoch, logs, rows, seconds, startup}
    workers: new Map(), // epoch -> {worker: [], rows: [], seconds: []}
    updates: new Map(), // epoch -> {count, perSecond, mean, max, staleness: Map}
    incidents: [],
    checkpoints: [],
    trials: new Map(), // number -> trial; an object is never changed, only replaced
    members: new Map(), // index -> [{epoch, logs}]
    ranks: new Map(), // rank -> {state, host, lines, omitted, epoch, logs}
    versions: {}, // part of the run -> how often it changed
  };
}

const REDUCERS = {
  run(run, message) {
    run.started = message.time || 0;
    run.kind = String(message.kind ?? "fit");
    run.name = String(message.name || message.run);
    run.settings = { ...message.settings };
    run.epochs = toCount(message.epochs);
    run.initialEpoch = toCount(message.initial_epoch) ?? 0;
    run.position = run.initialEpoch;
    run.metric = String(message.metric ?? "");
    run.minimizes = message.minimizes !== false;
    run.maxTrials = toCount(message.max_trials);
    run.parameters = toList(message.parameters).map((parameter) => ({
      name: String(parameter.name),
      options: toList(parameter.options).map(String),
      isLog: Boolean(parameter.is_log),
    }));
    touch(run, "settings", "trials");
  },

  phase(run, message) {
    run.phase = String(message.text ?? "");
  },

  resumed(run, message) {
    run.resumed.push(String(message.text ?? ""));
    for (const [index, epoch] of toList(message.epochs).entries()) {
      const logs = {};
      for (const [name, values] of Object.entries(message.history ?? {})) logs[name] = values?.[index];
      run.history.set(epoch, { epoch, logs: flattenLogs(logs), rows: null, seconds: null, startup: null });
    }
    run.position = Math.max(run.position, run.history.size);
    touch(run, "history", "settings");
  },

  count(run, message) {
    run.workerCount = toCount(message.workers);
  },

  progress(run, message) {
    run.progress = {
      epoch: toCount(message.epoch) ?? 0,
      done: message.done == null ? null : Math.min(1, Math.max(0, toNumber(message.done) ?? 0)),
      rows: toNumber(message.rows),
      rowsPerSecond: toNumber(message.rows_per_second),
      startup: toNumber(message.startup_seconds),
      logs: flattenLogs(message.logs),
      secondsLeft: toNumber(message.seconds_left),
      time: message.time,
    };
    run.position = run.progress.epoch + (run.progress.done ?? 0);
    run.phase = "";
  },

  epoch(run, message) {
    const epoch = toCount(message.epoch) ?? 0;
    run.history.set(epoch, {
      epoch,
      logs: flattenLogs(message.logs),
      rows: toNumber(message.rows),
      seconds: toNumber(message.seconds),
      startup: toNumber(message.startup_seconds),
    });
    run.position = epoch + 1;
    if (run.progress?.epoch === epoch) run.progress.done = 1;
    run.phase = "";
    touch(run, "history");
  },

  workers(run, message) {
    run.workers.set(toCount(message.epoch) ?? 0, {
      worker: toList(message.worker),
      rows: toList(message.rows).map(toNumber),
      seconds: toList(message.seconds).map(toNumber),
    });
    touch(run, "workers");
  },

  updates(run, message) {
    run.updates.set(toCount(message.epoch) ?? 0, {
      count: toNumber(message.count),
      perSecond: toNumber(message.per_second),
      mean: toNumber(message.mean_staleness),
      max: toNumber(message.max_staleness),
      staleness: new Map(
        Object.entries(message.staleness ?? {}).map(([value, count]) => [Number(value), toNumber(count) ?? 0]),
      ),
    });
    touch(run, "updates");
  },

  incident(run, message) {
    const { position } = run;
    run.incidents.push({ time: message.time, kind: String(message.kind ?? ""), text: String(message.text ?? ""), position });
    touch(run, "incidents");
  },

  checkpoint(run, message) {
    run.checkpoints.push({
      time: message.time,
      epoch: toCount(message.epoch),
      path: String(message.path ?? ""),
      seconds: toNumber(message.seconds),
    });
    touch(run, "checkpoints");
  },

  trial(run, message) {
    run.phase = "";
    const number = toCount(message.trial) ?? run.trials.size;
    run.trials.set(number, {
      number,
      status: String(message.status ?? "running"),
      params: { ...message.params },
      value: toNumber(message.value),
      bestEpoch: toCount(message.best_epoch),
      values: toList(message.values).map(toNumber),
      seconds: toNumber(message.seconds),
      worker: message.worker ?? null,
      attempts: toCount(message.attempts),
      error: plainText(message.error),
      traceback: plainText(message.traceback),
    });
    touch(run, "trials");
  },

  member(run, message) {
    const entries = toList(message.epochs).map((epoch, index) => {
      const logs = {};
      for (const [name, values] of Object.entries(message.history ?? {})) logs[name] = values?.[index];
      return { epoch, logs: flattenLogs(logs) };
    });
    run.members.set(toCount(message.member) ?? run.members.size, entries);
    touch(run, "members");
  },

  rank(run, message) {
    run.phase = "";
    const rank = rankOf(run, message.rank);
    rank.state = String(message.state ?? "");
    rank.host = String(message.host || rank.host);
    touch(run, "ranks");
  },

  report(run, message) {
    run.phase = "";
    const rank = rankOf(run, message.rank);
    rank.epoch = toCount(message.epoch) ?? 0;
    rank.logs = flattenLogs(message.logs);
    touch(run, "ranks");
    if (rank.rank === 0) reportOfRun(run, rank, message);
  },

  output(run, message) {
    const rank = rankOf(run, message.rank);
    rank.lines.push(...plainText(message.text).replace(/\n$/, "").split("\n"));
    rank.omitted += rank.lines.splice(0, Math.max(0, rank.lines.length - LAST_LINES)).length;
    touch(run, "ranks");
  },

  end(run, message) {
    run.status = String(message.status ?? "finished");
    run.error = plainText(message.error);
    run.traceback = plainText(message.traceback);
    run.seconds = toNumber(message.seconds);
    run.phase = "";
    touch(run, "settings");
  },
};

function rankOf(run, rank) {
  if (!run.ranks.has(rank)) run.ranks.set(rank, { rank, state: "", host: "", lines: [], omitted: 0, epoch: null, logs: {} });
  return run.ranks.get(rank);
}

/** What rank 0 reports is shown like the epochs of a fit. */
function reportOfRun(run, { epoch, logs }, message) {
  run.epochs = toCount(message.epochs) ?? run.epochs;
  run.history.set(epoch, { epoch, logs, rows: null, seconds: null, startup: null });
  run.position = epoch + 1;
  const secondsLeft = toNumber(message.seconds_left);
  run.progress = { epoch, done: null, rows: null, rowsPerSecond: null, startup: null, logs, secondsLeft, time: message.time };
  touch(run, "history");
}

function touch(run, ...parts) {
  for (const part of parts) run.versions[part] = (run.versions[part] ?? 0) + 1;
}

/** A number of a message, where "NaN" and infinities are strings; null for everything that is no number. */
function toNumber(value) {
  if (typeof value === "number") return value;
  if (value === "NaN") return NaN;
  if (value === "Infinity") return Infinity;
  if (value === "-Infinity") return -Infinity;
  return null;
}

function toCount(value) {
  return Number.isInteger(value) ? value : null;
}

function toList(value) {
  return Array.isArray(value) ? value : [];
}

/** Logs with one number for each name: the items of a list become `name[0]`, `name[1]`. */
function flattenLogs(logs) {
  const flat = {};
  const add = (name, value) => {
    if (Array.isArray(value)) value.slice(0, LIST_ITEMS).forEach((item, index) => add(`${name}[${index}]`, item));
    else if (toNumber(value) !== null) flat[name] = toNumber(value);
  };
  for (const [name, value] of Object.entries(logs ?? {})) add(name, value);
  return flat;
}

/** Text as a terminal shows it in the end. */
function plainText(text) {
  return String(text ?? "")
    .split("\n")
    .map(plainLine)
    .join("\n");
}

/** A line of output as a terminal shows it in the end: without escape sequences, and the last state of a progress bar. */
function plainLine(line) {
  const text = line.replace(/\u001b\[[0-9;?]*[ -/]*[@-~]/g, "").replace(/\r+$/, "");
  return text.slice(text.lastIndexOf("\r") + 1);
}
