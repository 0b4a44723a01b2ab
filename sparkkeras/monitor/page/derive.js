// What the page shows of a run that is not in its messages: curves, medians, the best of something, filters. Pure functions.

// A worker is slow if its median is this multiple of the median of the others, and this many seconds above it. The first
// epoch of a worker includes its start, and a few epochs say nothing.
const SLOW = 1.5;
const SLOW_SECONDS = 0.1;
const SLOW_EPOCHS = 3;
const HEAT_COLUMNS = 100;
const MOST_BARS = 40;
const HIGHER_IS_BETTER =
  /acc|auc|precision|recall|f1|f_score|fbeta|r2|iou|dice|similarity|sensitivity|specificity|kappa|bleu/i;

/** The entries of a Map of epochs, in order. Remembered until the Map's run changes. */
const sortedEpochs = remember((map) => [...map.values()].sort((one, other) => one.epoch - other.epoch));

/** `compute(map, version)`, computed again only for another version. */
function remember(compute) {
  const known = new WeakMap();
  return (object, version) => {
    const entry = known.get(object);
    if (entry && entry.version === version) return entry.value;
    const value = compute(object);
    known.set(object, { version, value });
    return value;
  };
}

/** The epochs of a run in order. */
function epochsOf(run) {
  return sortedEpochs(run.history, run.versions.history);
}

/** "f1" of "val_f1[2]": metrics of the same base are drawn in one chart. */
function baseOf(metric) {
  return metric.replace(/^val_/, "").replace(/(\[\d+\])+$/, "");
}

/**
 * The epochs of a view, of those from `first` to `last`: all if the view has none of them, as it may be for another run.
 *
 * @returns {{ends: [number, number], note: string}} with a note if these are not the ones of the view
 */
function shownEpochs({ from, to }, first, last) {
  const all = (note) => ({ ends: [first, last], note: note && `${note}: all are shown` });
  if (from !== null && to !== null && from > to) return all("The first epoch is after the last");
  const [low, high] = [Math.max(from ?? first, first), Math.min(to ?? last, last)];
  if (low > high) return all(`There are the epochs ${first} to ${last}`);
  if (low === high) return first === last ? all("") : all("This is a single epoch");
  return { ends: [low, high], note: "" };
}

/** The names of metrics by base, in the order in which they appear, the loss first. */
function metricGroups(entries) {
  const names = new Set(entries.flatMap((entry) => Object.keys(entry.logs)));
  names.delete("learning_rate");
  const groups = new Map();
  for (const name of [...names].sort((one, other) => isValidation(one) - isValidation(other))) {
    groups.set(baseOf(name), [...(groups.get(baseOf(name)) ?? []), name]);
  }
  return new Map([...groups].sort(([one], [other]) => (other === "loss") - (one === "loss")));
}

function isValidation(metric) {
  return metric.startsWith("val_");
}

/** The points [epoch from 1, value] of a metric; NaN and missing values are kept as they are. */
function curve(entries, metric) {
  return entries.filter((entry) => metric in entry.logs).map((entry) => [entry.epoch + 1, entry.logs[metric]]);
}

/** Exponential moving average without bias towards its start, as in Adam (Kingma 2015). Values that are not finite are gaps. */
function smooth(points, weight) {
  let mean = 0;
  let steps = 0;
  return points.map(([x, y]) => {
    if (!Number.isFinite(y)) return [x, y];
    mean = mean * weight + y * (1 - weight);
    steps += 1;
    return [x, mean / (1 - weight ** steps)];
  });
}

function median(values) {
  const sorted = values.filter(Number.isFinite).sort((one, other) => one - other);
  if (!sorted.length) return NaN;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** The seconds of each worker: {worker, points: [[epoch from 1, seconds]], ratio to the others, isSlow}. */
const workerTimes = remember((map) => {
  const points = new Map();
  for (const epoch of [...map.keys()].sort((one, other) => one - other)) {
    const report = map.get(epoch);
    report.worker.forEach((worker, index) => {
      if (!points.has(worker)) points.set(worker, []);
      points.get(worker).push([epoch + 1, report.seconds[index]]);
    });
  }
  const medians = new Map([...points].map(([worker, own]) => [worker, settledMedian(own)]));
  return [...points]
    .sort(([one], [other]) => one - other)
    .map(([worker, own]) => {
      const middle = medians.get(worker);
      const others = median([...medians].filter(([other]) => other !== worker).map(([, seconds]) => seconds));
      const isSlow = middle > SLOW * others && middle - others > SLOW_SECONDS;
      return { worker, points: own, ratio: middle / others, isSlow };
    });
});

/** The median of a worker's seconds after its first epoch, or NaN while they are few. */
function settledMedian(points) {
  const seconds = points
    .slice(1)
    .map(([, value]) => value)
    .filter(Number.isFinite);
  return seconds.length < SLOW_EPOCHS ? NaN : median(seconds);
}

function workersOf(run) {
  return workerTimes(run.workers, run.versions.workers);
}

/** The cells [column, row, mean seconds] of a heat map with at most `HEAT_COLUMNS` columns, and the columns' names. */
function heatCells(workers) {
  const epochs = [...new Set(workers.flatMap(({ points }) => points.map(([epoch]) => epoch)))].sort(
    (one, other) => one - other,
  );
  const width = Math.ceil(epochs.length / HEAT_COLUMNS);
  const column = new Map(epochs.map((epoch, index) => [epoch, Math.floor(index / width)]));
  const names = [];
  for (let start = 0; start < epochs.length; start += width) {
    const last = epochs[Math.min(start + width, epochs.length) - 1];
    names.push(last === epochs[start] ? String(last) : `${epochs[start]}–${last}`);
  }
  const cells = workers.flatMap(({ points }, row) => {
    const sums = new Map();
    for (const [epoch, seconds] of points) {
      if (!Number.isFinite(seconds)) continue;
      const [sum, count] = sums.get(column.get(epoch)) ?? [0, 0];
      sums.set(column.get(epoch), [sum + seconds, count + 1]);
    }
    return [...sums].map(([index, [sum, count]]) => [index, row, sum / count]);
  });
  return { names, cells };
}

/** The updates by staleness, of the last epoch or of all: [staleness or range, number of updates], without gaps. */
function stalenessBars(run, which) {
  const epochs = [...run.updates.keys()].sort((one, other) => one - other);
  const entries = (which === "last" ? epochs.slice(-1) : epochs).flatMap((epoch) => [...run.updates.get(epoch).staleness]);
  if (!entries.length) return [];
  const values = entries.map(([value]) => value);
  const [first, last] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const width = Math.ceil((last - first + 1) / MOST_BARS);
  const bars = Array.from({ length: Math.ceil((last - first + 1) / width) }, (_, index) => {
    const start = first + index * width;
    return [width > 1 ? `${start}–${start + width - 1}` : String(start), 0];
  });
  for (const [value, count] of entries) bars[Math.floor((value - first) / width)][1] += count;
  return bars;
}

/** Whether smaller values of a metric are better, judged by its name unless the run says so. */
function isMinimized(run, metric) {
  return metric === run.metric ? run.minimizes : !HIGHER_IS_BETTER.test(metric);
}

/** The best finite value and its index, or null. */
function bestOf(values, minimizes) {
  let best = null;
  values.forEach((value, index) => {
    if (Number.isFinite(value) && (!best || (minimizes ? value < best.value : value > best.value))) best = { value, index };
  });
  return best;
}

const sortedTrials = remember((map) => [...map.values()].sort((one, other) => one.number - other.number));

function trialsOf(run) {
  return sortedTrials(run.trials, run.versions.trials);
}

/** Trials with a value that counts: a pruned or failed trial may have one, but cannot be the best. */
function isComplete(trial) {
  return !["running", "pruned", "failed"].includes(trial.status) && Number.isFinite(trial.value);
}

function bestTrial(run) {
  const trials = trialsOf(run).filter(isComplete);
  const best = bestOf(
    trials.map((trial) => trial.value),
    run.minimizes,
  );
  return best && trials[best.index];
}

/** The points [number of the trial, best value so far]. */
function bestSoFar(run) {
  let best = null;
  const points = [];
  for (const trial of trialsOf(run)) {
    if (isComplete(trial) && (best === null || (run.minimizes ? trial.value < best : trial.value > best)))
      best = trial.value;
    if (best !== null) points.push([trial.number, best]);
  }
  return points;
}

function countBy(items, name) {
  const counts = new Map();
  for (const item of items) counts.set(name(item), (counts.get(name(item)) ?? 0) + 1);
  return counts;
}

/** The names of all hyper-parameters: those of the space, then others that trials have. */
function parameterNames(run) {
  return [
    ...new Set([...run.parameters.map(({ name }) => name), ...trialsOf(run).flatMap(({ params }) => Object.keys(params))]),
  ];
}

const NUMBER = String.raw`[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?`;
const TERMS = new RegExp(
  [
    String.raw`(?<field>[^\s<>=!]+?)\s*:\s*(?<low>${NUMBER})?\s*\.\.\s*(?<high>${NUMBER})?(?!\S)`,
    String.raw`(?<name>[^\s<>=!]+)\s*(?<operator><=|>=|==|!=|<|>|=)\s*(?<operand>"[^"]*"|[^\s<>=!"]+)`,
    String.raw`(?<word>\S+(?:\s*[<>=!]+)?)`,
  ].join("|"),
  "gi",
);

/**
 * A predicate for trials from what a user types: words that must occur, and conditions for columns such as `lr < 0.01`,
 * `units>=32`, `optimizer=adam` or `lr:1e-4..1e-2`.
 *
 * @returns {{matches: (trial: object) => boolean, problems: string[]}} conditions with a problem are left out
 */
function trialFilter(text, run) {
  const columns = filterColumns(run);
  const problems = [];
  const tests = [];
  for (const { groups } of text.matchAll(TERMS)) {
    const { test, problem } = groups.word === undefined ? condition(groups, columns) : wordFilter(groups.word, columns);
    if (problem) problems.push(problem);
    else tests.push(test);
  }
  return { matches: (trial) => tests.every((test) => test(trial)), problems };
}

function wordFilter(word, columns) {
  const isRange = word.includes(":") && columnsNamed(word.slice(0, word.indexOf(":")), columns).length > 0;
  if (/[<>=]/.test(word) || isRange) return { problem: `Incomplete: ${word}` };
  return { test: (trial) => searchText(trial).includes(word.toLowerCase()) };
}

function condition({ field, low, high, name, operator, operand }, columns) {
  const values = columnsNamed(field ?? name, columns);
  if (!values.length) return { problem: `No column ${field ?? name}` };
  const some = (test) => ({ test: (trial) => values.some((value) => test(value(trial) ?? null)) });
  if (field !== undefined) {
    const [least, most] = [Number(low ?? -Infinity), Number(high ?? Infinity)];
    return some((value) => toFloat(value) >= least && toFloat(value) <= most);
  }
  const text = operand.replace(/^"(.*)"$/, "$1");
  if (/[<>]/.test(operator) && Number.isNaN(toFloat(text))) return { problem: `Not a number: ${text}` };
  return some((value) => compare(value, operator, text));
}

function compare(value, operator, operand) {
  const isEqual = String(value ?? "").toLowerCase() === operand.toLowerCase() || value === toFloat(operand);
  const [number, limit] = [toFloat(value), toFloat(operand)];
  if (operator === "!=") return !isEqual;
  return {
    "=": isEqual,
    "==": isEqual,
    "<": number < limit,
    ">": number > limit,
    "<=": number <= limit,
    ">=": number >= limit,
  }[operator];
}

/** A number, also of text, as an option of a choice is text such as "32"; NaN for everything else. */
function toFloat(value) {
  return value === null || String(value).trim() === "" ? NaN : Number(value);
}

function columnsNamed(name, columns) {
  const wanted = columnName(name);
  return columns.filter(([label]) => label === wanted || label.endsWith(`/${wanted}`)).map(([, value]) => value);
}

function columnName(label) {
  return label.toLowerCase().replace(/\s+/g, "_");
}

/** What conditions may name, [name, value of a trial]: the columns of the table. The end of "model/units" is enough. */
function filterColumns(run) {
  const fields = {
    trial: ({ number }) => number,
    status: ({ status }) => status,
    value: ({ value }) => value,
    [columnName(run.metric || "value")]: ({ value }) => value,
    epoch: ({ bestEpoch }) => bestEpoch,
    best_epoch: ({ bestEpoch }) => bestEpoch,
    epochs: ({ values }) => values.length,
    time: ({ seconds }) => seconds,
    seconds: ({ seconds }) => seconds,
    worker: ({ worker }) => worker,
    attempts: ({ attempts }) => attempts,
  };
  for (const name of parameterNames(run)) fields[columnName(name)] = ({ params }) => params[name];
  return Object.entries(fields);
}

function searchText(trial) {
  const params = Object.entries(trial.params).map(([name, value]) => `${name}=${formatExact(value)}`);
  return [`#${trial.number}`, trial.status, trial.error, ...params].join(" ").toLowerCase();
}

/** The settings that differ between runs: [name, [text for each run]]. */
function differingSettings(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const rows = names.map((name) => [name, runs.map((run) => formatExact(run.settings[name]))]);
  return rows.filter(([, texts]) => new Set(texts).size > 1);
}

/** Whether it is known when a run began and how long it took: a saved History has no times. */
function hasTimes(run) {
  return run.status === "running" || run.seconds !== null;
}

/** The seconds that a run has taken, `sinceMessage` seconds after its last message; null if it has no times. */
function elapsedSeconds(run, sinceMessage) {
  if (run.status !== "running") return run.seconds;
  return Math.max(0, run.updated - run.started + sinceMessage);
}

function secondsLeft(run, sinceMessage) {
  const { progress } = run;
  if (run.status !== "running" || progress?.secondsLeft == null) return null;
  return Math.max(0, progress.secondsLeft - (run.updated - progress.time) - sinceMessage);
}
