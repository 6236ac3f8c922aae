// The form of docs/planner.md: makes a command line of it, has the worker run it, and shows what it answers.

const form = document.getElementById("planner");
const place = document.getElementById("planner-answer");
const status = document.getElementById("planner-status");
const stopButton = document.getElementById("planner-stop");
const buttons = [form.querySelector("[type=submit]"), document.getElementById("planner-fit")];

let worker = null;
let waiting = new Map(); // resolve functions by number of the request
let requests = 0;

function startWorker() {
  worker = new Worker(new URL("planner-worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => {
    const answer = waiting.get(data.number);
    waiting.delete(data.number);
    answer(data);
  };
  worker.onerror = (event) => fail(event.message || "the worker could not be started");
}

function fail(reason) {
  for (const answer of waiting.values()) answer({ error: reason });
  waiting.clear();
}

// Runs ds-hetero with each list of arguments until one fails. Resolves to the runs, and the files that are asked for.
function run(commands, files = []) {
  if (worker === null) startWorker();
  const number = requests++;
  return new Promise((resolve) => {
    waiting.set(number, resolve);
    worker.postMessage({ number, commands, files });
  });
}

// Names of the form are options; empty ones are left to the command's defaults.
function optionsOfForm() {
  return [...form.elements].filter((field) => field.name).flatMap((field) => {
    if (field.type === "checkbox") return field.checked ? [`--${field.name}`] : [];
    const value = field.value.trim();
    return value ? [`--${field.name}`, value] : [];
  });
}

function shellLine(command) {
  const words = command.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`));
  return ["ds-hetero", ...words].join(" ");
}

function writeHash() {
  const values = new URLSearchParams();
  for (const field of form.elements) {
    if (field.name) values.set(field.name, field.type === "checkbox" ? Number(field.checked) : field.value.trim());
  }
  history.replaceState(null, "", `#${values}`);
}

// Whether the address held values of the form.
function readHash() {
  const values = new URLSearchParams(location.hash.slice(1));
  if (!values.has("gpus")) return false;
  for (const field of form.elements) {
    if (!field.name || !values.has(field.name)) continue;
    if (field.type === "checkbox") field.checked = values.get(field.name) === "1";
    else field.value = values.get(field.name);
  }
  return true;
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function preformatted(text) {
  return element("pre", {}, element("code", { textContent: text }));
}

function details(summary, text, id) {
  return element("details", { id }, element("summary", { textContent: summary }), preformatted(text));
}

// What the command said beside its answer: notes, or why there is no answer.
function remarks(text, kind) {
  // The command wraps long lines at 80 columns, with continuations further in; a paragraph wraps by itself.
  const lines = text.replace(/\n +/g, " ").split("\n").filter((line) => line.trim());
  return lines.map((line) => element("p", { className: `planner-${kind}`, textContent: line }));
}

// The page of ds-hetero report, as tall as it is, in the colours of this one.
function framed(html) {
  const frame = element("iframe", { className: "planner-page", title: "The plan", srcdoc: html });
  frame.addEventListener("load", () => {
    const page = frame.contentDocument.documentElement;
    new ResizeObserver(() => (frame.style.height = `${page.offsetHeight + 8}px`)).observe(page);
  });
  return frame;
}

function download(name, content, kind) {
  const url = URL.createObjectURL(new Blob([content], { type: kind }));
  return element("a", { className: "md-button", href: url, download: name, textContent: name });
}

// The best job and the best of every other kind, and what the command line advises beside a plan of one schedule, from its JSON.
function advice(plan) {
  const { job, alternatives, advice } = JSON.parse(plan.out);
  const { leave_out: fewer, zero_stage: stage } = advice;
  const lines = [];
  if (job) {
    const without = job.left_out.length ? `, without ranks ${job.left_out.join(", ")}` : "";
    lines.push(`Best job: ${job.name}${without}, ZeRO ${job.settings.zero_stage}, ${job.step_s.toPrecision(3)} s per step.`);
    for (const other of alternatives) {
      const slower = other.step_s ? `${other.factor.toFixed(2)} times the time` : "no";
      lines.push(`${other.name}: ${slower}; ${other.reason}.`);
    }
  }
  if (fewer) lines.push(`A job without ranks ${fewer.ranks.join(", ")} would take ${fewer.iteration_s.toPrecision(3)} s per step.`);
  if (stage) lines.push(`Under ZeRO stage ${stage.stage} this schedule would take ${stage.iteration_s.toPrecision(3)} s per step, and fits.`);
  return remarks(lines.join("\n"), "note");
}

function showPlan(command, answer) {
  const [plan, page] = answer.runs;
  if (plan.code !== 0) return refuse(plan);
  if (page.code !== 0) return refuse(page);
  const html = answer.files["plan.html"];
  place.append(
    ...remarks(plan.err, "note"),
    preformatted(shellLine(command)),
    ...advice(plan),
    framed(html),
    element("p", {}, download("plan.json", answer.files["plan.json"], "application/json"), " ", download("plan.html", html, "text/html")),
    details("All numbers of the answer, as JSON", plan.out, "planner-json"),
  );
}

function showFit(command, answer) {
  const [fit] = answer.runs;
  if (fit.code > 1) return refuse(fit);
  place.append(...remarks(fit.err, "note"), preformatted(shellLine(command)), preformatted(fit.out));
}

function refuse(run) {
  place.append(...remarks(run.err, "error"));
}

// Without Python in the site there is nothing to press.
async function listModels() {
  const listed = await fetch(new URL("../assets/planner/files.json", import.meta.url)).catch(() => null);
  if (!listed?.ok) {
    for (const button of buttons) button.disabled = true;
    place.replaceChildren(...remarks("This site was built without the planner: see below.", "error"));
    return false;
  }
  const models = (await listed.json()).models;
  document.getElementById("planner-models").append(...models.map((value) => element("option", { value })));
  return true;
}

// One command at a time: the buttons come back with its answer.
async function answerTo(name) {
  if (buttons[0].disabled || !form.reportValidity()) return;
  const command = [name, ...optionsOfForm()];
  writeHash();
  place.replaceChildren();
  for (const button of buttons) button.disabled = true;
  stopButton.hidden = false;
  status.textContent = worker === null ? "loading Python" : "computing";
  try {
    const loaded = await run([]);
    if (!loaded.error) status.textContent = "computing";
    const started = performance.now();
    const answer = loaded.error ? loaded : await (name === "plan" ? run(...planCommands(command)) : run([command]));
    status.textContent = answer.error ? "" : `answered in ${((performance.now() - started) / 1000).toFixed(1)} s`;
    if (answer.error) place.append(...remarks(answer.error, "error"));
    else (name === "plan" ? showPlan : showFit)(command, answer);
  } finally {
    for (const button of buttons) button.disabled = false;
    stopButton.hidden = true;
    form.dataset.answered = shellLine(command);
  }
}

function planCommands(command) {
  const page = ["report", "plan.json", "--no-sliders", "--out", "plan.html"];
  return [[[...command, "--json", "--out", "plan.json"], page], ["plan.json", "plan.html"]];
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  answerTo("plan");
});
buttons[1].addEventListener("click", () => answerTo("fit"));
stopButton.addEventListener("click", () => {
  worker.terminate();
  worker = null;
  fail("stopped");
});
window.addEventListener("hashchange", () => readHash() && answerTo("plan"));
const linked = readHash();
if ((await listModels()) && linked) answerTo("plan");
