"use strict";

// Shows the status that the balancer sends once a second. All text goes in as text, never as markup.

const STALE_AFTER = 10_000; // ms without news: the balancer, or what is between us, does not answer
const POLL_EVERY = 5_000; // ms, where the balancer feeds as many pages as it will
const WINDOW = 900; // s

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// --- how values read ---

const whole = (text) => text.replaceAll(" ", "\u00a0"); // a number and its unit stay on one line
const round = (value, digits = 3) => String(Number(value.toPrecision(digits)));
const many = (value) => value.toLocaleString("en");
const percent = (part) => whole(part > 0 && part < 0.0005 ? "<0.1 %" : `${(part * 100).toFixed(1)} %`);
const rate = (value) => whole(`${value < 100 ? round(value) : many(Math.round(value))} /s`);
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const plural = (count, word) => `${many(count)} ${word}${count === 1 ? "" : "s"}`;

function span(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.9995) return whole(`${round(seconds * 1000)} ms`);
  return seconds < 99.5 ? whole(`${round(seconds)} s`) : age(seconds);
}

function age(seconds) {
  const full = Math.max(0, Math.floor(seconds));
  if (full < 60) return whole(`${full} s`);
  if (full < 3600) return whole(`${Math.floor(full / 60)} min ${full % 60} s`);
  if (full < 86400) return whole(`${Math.floor(full / 3600)} h ${Math.floor((full % 3600) / 60)} min`);
  return whole(`${Math.floor(full / 86400)} d ${Math.floor((full % 86400) / 3600)} h`);
}

function when(at, now) {
  const date = new Date(at * 1000);
  return now - at < 86400 ? clock(at) : `${date.toLocaleDateString("en-CA")} ${clock(at)}`;
}

// --- small DOM helpers: nothing is touched that has not changed, so that selections last ---

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setClass(node, name) {
  if (node.getAttribute("class") !== name) node.setAttribute("class", name);
}

function element(tag, parent, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  parent.append(node);
  return node;
}

function drawn(tag, parent, className) {
  const node = document.createElementNS(SVG, tag);
  node.setAttribute("class", className);
  parent.append(node);
  return node;
}

// --- summary ---

function verdict(data) {
  if (data.draining) return ["Draining", "warn"];
  return data.not_ready === null ? ["Ready", "good"] : [`Not ready: ${data.not_ready}`, "bad"];
}

function syncFact({ sync, now }) {
  const last = sync.last_answer === null ? "never answered" : `answered ${age(now - sync.last_answer)} ago`;
  if (sync.failing_since !== null) {
    return [`failing for ${age(now - sync.failing_since)}`, `${last} · ${sync.result}: ${sync.cause}`, "bad"];
  }
  if (sync.result === null) return ["not yet", "the first call is on its way", "warn"];
  const level = sync.result === "ok" ? "" : "warn";
  return [`${sync.result}, ${age(now - sync.last_answer)} ago`, `every ${span(sync.interval)}`, level];
}

function heldFact({ held, now, sync }) {
  if (held === null) return ["no", `grace period ${span(sync.grace_period)}`];
  return [`held for ${age(now - held.since)}`, `released in ${age(held.until - now)}, if it stays empty`, "warn"];
}

function replicasFact({ counts }) {
  const routable = counts.serving + counts.held;
  const states = Object.entries(counts).filter(([, count]) => count > 0);
  const text = states.map(([state, count]) => whole(`${many(count)} ${state}`)).join(" · ");
  return [`${many(routable)} routable`, text || "none known", routable ? "" : "bad"];
}

function percentilesFact(found) {
  return [span(found.p50), `p95 ${span(found.p95)} · p99 ${span(found.p99)}`];
}

function facts(data) {
  const { about, recent } = data;
  const failed = recent.failed === null ? ["–", "no requests"] : [percent(recent.failed), "of requests, last minute"];
  if (recent.failed > 0) failed.push("bad");
  return {
    Replicas: replicasFact(data),
    "Sync with the controller": syncFact(data),
    "List held": heldFact(data),
    Policy: [about.policy, about.sticky === null ? "no sticky sessions" : `sticky by ${about.sticky}`],
    Requests: [rate(recent.rate), "last minute"],
    Failed: failed,
    "Time to first byte, median": percentilesFact(recent.first_byte),
    "In flight": [many(data.in_flight), data.in_flight ? `oldest ${span(data.oldest_seconds)}` : "none waits"],
  };
}

function showFacts(data) {
  const list = byId("facts");
  Object.entries(facts(data)).forEach(([name, [value, more, level = ""]], index) => {
    let box = list.children[index];
    if (!box) {
      box = element("div", list);
      element("dt", box, "", name);
      element("dd", box);
      element("dd", box, "more");
    }
    setText(box.children[1], value);
    setClass(box.children[1], `value ${level}`.trim());
    setText(box.children[2], more);
  });
}

// --- plots ---

const failedOf = (rates) => add(rates.upstream_error, rates.lb_error);
const add = (one = [], other = []) => one.map((value, index) => value + other[index]);

const latencies = (found) => ({ p50: found.p50, p95: found.p95, p99: found.p99 });

const PLOTS = [
  {
    title: "Requests a second",
    show: rate,
    of: ({ rate: rates }) => ({
      answered: rates.ok,
      failed: failedOf(rates),
      "client error or left": add(rates.client_error, rates.client_closed),
    }),
  },
  { title: "Time to first byte", show: span, of: (history) => latencies(history.first_byte) },
  { title: "Duration", show: span, of: (history) => latencies(history.duration) },
  { title: "In flight", show: many, of: (history) => ({ requests: history.in_flight }) },
];
const INKS = ["one", "two", "three"];
const WIDTH = 300;
const HEIGHT = 80;

let cursor = null; // ticks back from the newest one, while somebody points at a plot
let latest = null;

function niceTop(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * unit >= value * 0.9999) * unit;
}

function line(values, xs, top) {
  let path = "";
  let down = false;
  values.forEach((value, index) => {
    if (value === null) {
      down = false;
      return;
    }
    const y = (HEIGHT * (1 - value / top)).toFixed(1);
    // A point without neighbours is a line of no length: a dot.
    path += down ? `L${xs[index]} ${y}` : `M${xs[index]} ${y}h0`;
    down = true;
  });
  return path;
}

function makePlot(plot) {
  const figure = element("figure", byId("plots"));
  element("figcaption", figure, "", plot.title);
  plot.top = element("div", figure, "top");
  const area = element("div", figure, "area");
  plot.svg = drawn("svg", area, "");
  plot.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  plot.svg.setAttribute("preserveAspectRatio", "none");
  plot.svg.setAttribute("role", "img");
  plot.svg.setAttribute("tabindex", "0");
  for (const y of [0, HEIGHT / 2, HEIGHT]) {
    const rule = drawn("line", plot.svg, "rule");
    rule.setAttribute("x2", WIDTH);
    rule.setAttribute("y1", y);
    rule.setAttribute("y2", y);
  }
  plot.cursor = drawn("line", plot.svg, "cursor");
  plot.cursor.setAttribute("y2", HEIGHT);
  const axis = element("div", figure, "axis");
  element("span", axis, "", "15 min ago");
  element("span", axis, "", "now");
  plot.legend = element("ul", figure, "legend");
  plot.lines = [];
  plot.svg.addEventListener("pointermove", point);
  plot.svg.addEventListener("pointerdown", point);
  plot.svg.addEventListener("pointerleave", () => moveCursor(null));
  plot.svg.addEventListener("blur", () => moveCursor(null));
  plot.svg.addEventListener("keydown", step);
}

function legendEntry(plot, index, name) {
  const entry = element("li", plot.legend);
  const swatch = drawn("svg", entry, "");
  swatch.setAttribute("viewBox", "0 0 20 8");
  swatch.setAttribute("aria-hidden", "true");
  drawn("path", swatch, INKS[index]).setAttribute("d", "M1 4H19");
  element("span", entry, "", name);
  return { path: drawn("path", plot.svg, INKS[index]), value: element("span", entry, "number") };
}

function showPlot(plot, { history, now }) {
  if (!plot.svg) makePlot(plot);
  const series = Object.entries(plot.of(history)).map(([name, values]) => [name, values ?? []]);
  const highest = Math.max(0, ...series.flatMap(([, values]) => values));
  const top = niceTop(highest);
  setText(plot.top, plot.show(top));
  const xs = history.at.map((at) => (WIDTH * (1 - (now - at) / WINDOW)).toFixed(1));
  const at = history.at.length - 1 - (cursor ?? 0);
  const words = series.map(([name, values], index) => {
    plot.lines[index] ??= legendEntry(plot, index, name);
    const value = at >= 0 && values[at] !== null && values[at] !== undefined ? plot.show(values[at]) : "–";
    plot.lines[index].path.setAttribute("d", line(values, xs, top));
    setText(plot.lines[index].value, value);
    return `${name} ${value}`;
  });
  const pointed = cursor !== null && at >= 0;
  plot.cursor.setAttribute("visibility", pointed ? "visible" : "hidden");
  if (pointed) {
    plot.cursor.setAttribute("x1", xs[at]);
    plot.cursor.setAttribute("x2", xs[at]);
  }
  const label = `${plot.title}, ${pointed ? `at ${clock(history.at[at])}` : "now"}: ${words.join(", ")}; highest ${plot.show(highest)}`;
  if (plot.svg.getAttribute("aria-label") !== label) plot.svg.setAttribute("aria-label", label);
}

function showPlots(data) {
  const at = data.history.at[data.history.at.length - 1 - (cursor ?? 0)];
  setText(byId("cursor"), cursor !== null && at !== undefined ? `at ${clock(at)}` : "");
  for (const plot of PLOTS) showPlot(plot, data);
}

function moveCursor(back) {
  if (latest === null || back === cursor) return;
  cursor = back === null ? null : Math.min(Math.max(back, 0), latest.history.at.length - 1);
  showPlots(latest);
}

function point(event) {
  const box = event.currentTarget.getBoundingClientRect();
  const at = latest.now - WINDOW * (1 - (event.clientX - box.left) / box.width);
  const ticks = latest.history.at;
  if (ticks.length === 0) return;
  const distances = ticks.map((tick) => Math.abs(tick - at));
  moveCursor(ticks.length - 1 - distances.indexOf(Math.min(...distances)));
}

function step(event) {
  const by = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
  if (by) moveCursor(cursor === null ? 0 : cursor + by);
  else if (event.key === "Escape") moveCursor(null);
  else return;
  event.preventDefault();
}

// --- tables ---

// Rows are kept by key; `fill` writes into the cells of one.
function showRows(body, items, key, make, fill) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  items.forEach((item, index) => {
    let row = old.get(key(item));
    old.delete(key(item));
    if (!row) {
      row = document.createElement("tr");
      row.setAttribute("role", "row");
      row.dataset.key = key(item);
      make(row);
    }
    fill(row.children, item);
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
  for (const row of old.values()) row.remove();
}

function cell(row, className = "", label = "") {
  const node = element("td", row, className);
  node.setAttribute("role", "cell");
  if (label) node.dataset.label = label;
  return node;
}

const LEVELS = { serving: "good", held: "warn", draining: "warn" };

function makeReplica(row) {
  const name = element("th", row);
  name.setAttribute("role", "rowheader");
  name.setAttribute("scope", "row");
  const state = element("span", cell(row, "", "state"));
  for (const look of ["badge", "badge bad", "quiet"]) {
    element("span", state, look);
    state.append(" ");
  }
  cell(row, "", "accelerator");
  cell(row, "number", "in flight");
  cell(row, "number", "requests, 15 min");
  const share = element("span", cell(row, "number", "share"));
  element("span", share, "share");
  element("span", share, "percent");
  cell(row, "number", "errors");
  element("time", cell(row, "number", "since"));
}

function setAside(each, now) {
  if (!each.ejected) return "";
  const left = each.ejected_until - now;
  const next = left > 0 ? `tried again in ${age(Math.ceil(left))}` : "the next request tries it";
  return `${plural(each.failures, "failure")} in a row, ${next}`;
}

function fillReplica(cells, each, now) {
  const [name, state, accelerator, inFlight, finished, share, errors, since] = cells;
  const [badge, ejected, why] = state.firstChild.children;
  setText(name, each.name);
  setText(badge, each.state);
  setClass(badge, `badge ${LEVELS[each.state] ?? "warn"}`);
  setText(ejected, each.ejected ? "ejected" : "");
  setText(why, setAside(each, now));
  setText(accelerator, each.accelerator ?? "");
  setText(inFlight, many(each.in_flight));
  setText(finished, many(each.finished));
  const [bar, part] = share.firstChild.children;
  bar.style.backgroundSize = `${((each.share ?? 0) * 100).toFixed(1)}% 100%`;
  setText(part, each.share === null ? "–" : percent(each.share));
  setText(errors, each.failed ? `${many(each.failed)} (${percent(each.failed / each.finished)})` : "0");
  setText(since.firstChild, `${age(now - each.since)} ago`);
  const exact = new Date(Math.round(each.since) * 1000);
  since.firstChild.dateTime = exact.toISOString();
  since.firstChild.title = exact.toLocaleString();
}

function showReplicas(data) {
  const { replicas, now } = data;
  const body = byId("replicas").tBodies[0];
  showRows(body, replicas, (each) => each.url, makeReplica, (cells, each) => fillReplica(cells, each, now));
  byId("no-replicas").hidden = replicas.length > 0;
}

function makeEvent(row) {
  cell(row);
  cell(row);
  cell(row);
}

function fillEvent([time, event, details], each, now) {
  if (time.textContent) return; // an event does not change
  setText(time, when(each.at, now));
  if (each.level !== "info") {
    element("span", event, `badge ${each.level === "error" ? "bad" : "warn"}`, each.level);
    event.append(" ");
  }
  element("span", event, "", each.event);
  for (const [name, value] of Object.entries(each.fields)) {
    const field = element("span", details, "field");
    element("span", field, "name", `${name} `);
    element("span", field, "", value);
    details.append(" ");
  }
}

function showEvents({ events, now }) {
  const seen = {};
  const keyed = events.map((each) => {
    const key = `${each.at} ${each.event}`;
    seen[key] = (seen[key] ?? 0) + 1;
    return { each, key: `${key} ${seen[key]}` };
  });
  const body = byId("events").tBodies[0];
  showRows(body, keyed.reverse(), ({ key }) => key, makeEvent, (cells, { each }) => fillEvent(cells, each, now));
}

// --- all of it ---

function show(data, text, level) {
  if (latest !== null && latest.about.version !== data.about.version) location.reload(); // upgraded
  latest = data;
  heard = Date.now();
  const [state, stateLevel] = verdict(data);
  const { about } = data;
  document.title = `${about.service}: ${state.toLowerCase()} · skyserve-lb`;
  document.body.classList.remove("stale");
  byId("main").hidden = false;
  setText(byId("service"), about.service);
  setText(byId("state"), state);
  setClass(byId("state"), `badge ${stateLevel}`);
  const processes = data.processes > 1 ? ` · ${data.processes} processes` : "";
  setText(byId("about"), `skyserve-lb ${about.version} · ${about.mode}${processes} · up ${age(data.now - about.started)}`);
  setText(byId("link"), text);
  setClass(byId("link"), level);
  showFacts(data);
  showPlots(data);
  showReplicas(data);
  showEvents(data);
}

function lost() {
  if (document.hidden || document.body.classList.contains("stale")) return;
  document.body.classList.add("stale");
  const old = latest === null ? "" : ` What is below was so at ${clock(latest.now)}.`;
  setText(byId("link"), `The balancer cannot be reached since ${clock(Date.now() / 1000)}; trying again.${old}`);
  setClass(byId("link"), "bad");
  document.title = `cannot be reached · ${latest?.about.service ?? ""} · skyserve-lb`;
}

// --- news from the balancer ---

let source = null;
let again = 0;
let heard = Date.now();

function listen() {
  clearTimeout(again);
  source?.close();
  if (document.hidden) return; // a page that nobody sees takes no listener's place
  heard = Date.now();
  source = new EventSource("events");
  source.onmessage = (message) => show(JSON.parse(message.data), "Live", "quiet");
  source.onerror = (event) => {
    if (event.target.readyState === EventSource.CLOSED) ask();
    else lost();
  };
}

// Where the balancer will not feed us, ask it once, and try again later.
async function ask() {
  try {
    const answer = await fetch("status", { signal: AbortSignal.timeout(POLL_EVERY) });
    if (!answer.ok) throw new Error(answer.statusText);
    const every = POLL_EVERY / 1000;
    show(await answer.json(), `Not live, read every ${every} s: the balancer feeds as many pages as it will.`, "warn");
  } catch {
    lost();
  }
  again = setTimeout(listen, POLL_EVERY);
}

document.addEventListener("visibilitychange", listen);
setInterval(() => Date.now() - heard > STALE_AFTER && lost(), 1000);
listen();
