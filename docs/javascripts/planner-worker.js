// Runs ds-hetero in Pyodide, beside the page, which so never freezes. What is loaded is listed by .ci/planner.py.

const home = new URL("../assets/planner/", import.meta.url);

const DRIVER = `
import contextlib, io, json, os

os.environ["COLUMNS"] = "80"

def run(arguments):
    from ds_hetero.cli import main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments.to_py())
        except SystemExit as end:
            code = end.code
    return json.dumps({"code": int(code or 0), "out": out.getvalue(), "err": err.getvalue()})

run
`;

async function start() {
  const { archives } = await (await load("files.json")).json();
  const { loadPyodide } = await import(new URL("pyodide.mjs", home));
  const [python, ...contents] = await Promise.all([
    loadPyodide({ indexURL: home.href }),
    ...archives.map(async (name) => (await load(name)).arrayBuffer()),
  ]);
  archives.forEach((name, i) => python.unpackArchive(contents[i], name.endsWith(".whl") ? "whl" : "zip"));
  return { python, run: python.runPython(DRIVER) };
}

async function load(name) {
  const answer = await fetch(new URL(name, home));
  if (!answer.ok) throw new Error(`${name}: ${answer.status} ${answer.statusText}`);
  return answer;
}

const started = start();

self.onmessage = async ({ data: { number, commands, files } }) => {
  try {
    const { python, run } = await started;
    const runs = [];
    for (const command of commands) {
      runs.push(JSON.parse(run(command)));
      if (runs.at(-1).code !== 0) break;
    }
    const read = runs.every(({ code }) => code === 0) ? files : [];
    const text = (name) => python.FS.readFile(name, { encoding: "utf8" });
    self.postMessage({ number, runs, files: Object.fromEntries(read.map((name) => [name, text(name)])) });
  } catch (error) {
    self.postMessage({ number, error: String(error.message || error) });
  }
};
