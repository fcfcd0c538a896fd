"""Everything a developer or CI runs. `python -m pip install nox && python -m nox -s demo` is where to begin."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox

nox.options.sessions = ["tests", "tests_more", "lint", "types", "runtime_only", "planning_only"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False

# One torch for all sessions: results and timings are compared between them.
TORCH = "torch==2.13.0"
# For its interpreter: kernels of the GPU tier run without a GPU. 273 MiB to fetch.
TRITON = "triton==3.9.0; platform_system == 'Linux'"
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
"""Whose source package has llama.cpp with its converter, vocabularies and templates."""
PYTHONS = ["3.11", "3.12", "3.13"]
# One process a core, up to four: each imports torch. A file's tests share what they set up, so they stay together.
# tests/conftest.py says which files come first. A process that crashes ends the run: with another in its place
# pytest-xdist may wait for ever.
PYTEST = ["pytest", "-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadfile", "--no-loadscope-reorder"]
PYTEST += ["--max-worker-restart", "0"]
# What imports packages that may be missing, or says so; each kernel is compiled once on this Python.
WITHOUT_COMPILE = [
    *("tests/runtime/" + name for name in ("artifact", "commands", "test_imports.py", "test_surface.py")),
    *("tests/runtime/" + name for name in ("test_console_scripts.py", "test_error_wording.py", "test_errors.py")),
    *("tests/runtime/engine/test_" + name for name in ("generation.py", "model.py", "options.py")),
    *("tests/runtime/kernels/test_forward.py", "-m", "not more"),
]
WITHOUT_TORCH = [
    *("tests/compile/" + name for name in ("cli", "machine", "planning", "report", "test_errors.py", "test_recipe.py")),
    *("tests/compile/pipeline/test_lock_file.py", "tests/compile/placement/test_stage.py", "-m", "not more"),
]
TEST_TOOLS, BROWSER_TOOLS = (
    nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), group) for group in ("test", "browser")
)

if shutil.which("pyenv"):
    # pyenv's `python3.12` answers only if that version is selected, and its shim has selected the one we run on: add
    # all that are installed.
    listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False).stdout
    ours = [v for p in PYTHONS for v in listed.split() if v.startswith(f"{p}.")]
    chosen = [v for v in os.environ.get("PYENV_VERSION", "").split(":") if v]
    os.environ["PYENV_VERSION"] = ":".join(dict.fromkeys([*chosen, *ours])) or "system"


def install_all(session: nox.Session) -> None:
    # torch first and pinned, or the other packages would pull another build of it.
    session.install(TORCH, TRITON)
    session.install("-e", ".[compile,serve]", *TEST_TOOLS)


@nox.session
def demo(session: nox.Session) -> None:
    """Compile the bundled model, answer a prompt, and show what was done."""
    session.install(TORCH)
    session.install("-e", ".[compile]")
    session.run("python", "recipes/demo/demo.py", *session.posargs)


def run_tests(session: nox.Session, *chosen: str) -> None:
    install_all(session)
    session.install(*BROWSER_TOOLS)
    # Kernels are compiled once, by both processors, and all workers read them from the cache.
    session.run("pi-run", "tests/runtime/artifact/golden.pi", "--prompt", "warm", "--max-tokens", "2", silent=True)
    session.run(*PYTEST, *(session.posargs or chosen))


@nox.session
def tests(session: nox.Session) -> None:
    """Tests of every room, in some minutes. With arguments, what they choose of the whole suite."""
    run_tests(session, "-m", "not more")


@nox.session
def tests_more(session: nox.Session) -> None:
    """The rest of the suite: other instruction sets, the GPU tier, a browser where there is one, kills, variants."""
    run_tests(session, "-m", "more")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, and who may import whom."""
    session.install("ruff==0.17.5", "import-linter==2.16", "-e", ".")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Strict type checking."""
    install_all(session)
    session.install("mypy==2.4.1")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a broken link, anchor or reference fails. `-- serve` shows it meanwhile."""
    session.install("mkdocs==1.6.1", "mkdocs-material==9.8.1", "mkdocstrings[python]==1.0.8", "ruff==0.17.5", "-e", ".")
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(python=PYTHONS)
def runtime_only(session: nox.Session) -> None:
    """Without the compile extra: generate from the golden artifact, and test what a missing package changes.

    The tests run on the newest Python, and on the oldest unless it runs nox: there `tests` has run them.
    `-- tests/runtime` runs all.
    """
    session.install("-e", ".", *TEST_TOOLS)
    session.run("python", "-c", "import importlib.util as u; assert not u.find_spec('torch')")
    session.run("pi-run", "tests/runtime/artifact/golden.pi", "--prompt", "golden", "--max-tokens", "8", "--stats")
    ours = "{}.{}".format(*sys.version_info)
    if session.python == PYTHONS[-1] or (session.python == PYTHONS[0] != ours) or session.posargs:
        session.run(*PYTEST, *(session.posargs or WITHOUT_COMPILE))


@nox.session(python=PYTHONS[-1])
def planning_only(session: nox.Session) -> None:
    """With the `report` extra alone, on the newest Python: pass what a missing torch changes in the compiler."""
    session.install("-e", ".[report]", *TEST_TOOLS)
    session.run("python", "-c", "import importlib.util as u; assert not u.find_spec('torch')")
    session.run(*PYTEST, *(session.posargs or WITHOUT_TORCH))


@nox.session
def arm64(session: nox.Session) -> None:
    """Tests of kernels, execution and artifacts on arm64, which QEMU emulates. Needs root on Debian. Takes an hour."""
    session.run("python", "tests/support/arm64.py", str(session.cache_dir / "arm64"), *session.posargs)


@nox.session(python=PYTHONS)
def placements(session: nox.Session) -> None:
    """Recompute the locked placements with the `place` extra alone: all small ones; `-- all` for the large too."""
    session.install("-e", ".[place]")
    session.run("python", "-c", "import importlib.util as u; assert not u.find_spec('torch')")
    for lock in sorted(Path("recipes").glob("*.lock")):
        if "175b" not in lock.stem or "all" in session.posargs:
            # Neither locale nor threads may matter.
            env = {"LC_ALL": "C", "OMP_NUM_THREADS": "1"} if session.python == PYTHONS[0] else {"LC_ALL": "C.UTF-8"}
            session.run(
                "pi-compile", "place", str(lock.with_suffix(".toml")), "--locked", "--json", env=env, silent=True
            )


@nox.session
def package(session: nox.Session) -> None:
    """Build sdist and wheel, and use the wheel as its users do: by pip, uv and pipx, outside the repository.

    Two builds must be alike to the byte, and `twine` must find nothing.
    """
    session.install("build==1.6.1", "hatchling==1.33.0", "mypy==2.4.1", "uv==0.13.8", "pipx==1.18.4", "twine==6.2.0")
    root = Path.cwd()
    golden, typed = root / "tests/runtime/artifact/golden.pi", root / "tests/packages/typed.py"
    with tempfile.TemporaryDirectory() as name, session.chdir(name):
        folder = Path(name)
        # Both build without isolation: what builds them is installed already.
        session.run("python", "-m", "build", "--no-isolation", "-o", name, str(root), silent=True)
        session.run("python", "-m", "build", "--no-isolation", "--wheel", "-o", "direct", str(root), silent=True)
        (wheel,) = folder.glob("*.whl")
        if wheel.read_bytes() != (folder / "direct" / wheel.name).read_bytes():
            session.error("the sdist builds another wheel than the repository")
        session.run("python", "-m", "build", "--no-isolation", "--sdist", "-o", "again", str(root), silent=True)
        (sdist,) = folder.glob("*.tar.gz")
        if sdist.read_bytes() != (folder / "again" / sdist.name).read_bytes():
            session.error("two builds of the sdist differ")
        session.run("twine", "check", "--strict", str(wheel), str(sdist))

        session.run("python", "-m", "venv", "pip")
        session.run("pip/bin/python", "-m", "pip", "install", "--quiet", f"{wheel}[place]", external=True)
        session.run("mypy", "--strict", "--python-executable", "pip/bin/python", str(typed))
        session.run("pip/bin/pi-run", str(golden), "--prompt", "golden", "--max-tokens", "8", external=True)
        _use(session, folder / "pip/bin")

        wanted = f"pi-toolchain[place] @ {wheel.as_uri()}"
        uv = {"UV_TOOL_DIR": f"{name}/uv", "UV_TOOL_BIN_DIR": f"{name}/uv-bin"}
        session.run("uv", "tool", "install", "--quiet", wanted, env=uv)
        _use(session, folder / "uv-bin")
        session.run("uvx", "--quiet", "--from", wanted, "pi-run", "--version", env=uv)

        pipx = {"PIPX_HOME": f"{name}/pipx", "PIPX_BIN_DIR": f"{name}/pipx-bin", "PIPX_DEFAULT_BACKEND": "uv"}
        session.run("pipx", "install", "--quiet", wanted, env=pipx)
        _use(session, folder / "pipx-bin")


@nox.session
def bare_root(session: nox.Session) -> None:
    """Build the demo from the wheel alone, in a Debian that has its base system and Python. Outside CI: needs root.

    debootstrap makes that Debian of the packages that this machine's apt reads.
    """
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        session.error("this session needs root and debootstrap (apt-get install debootstrap)")
    session.install("build==1.6.1", "hatchling==1.33.0")
    root = Path(session.create_tmp()).absolute() / "root"
    shutil.rmtree(root, ignore_errors=True)
    run = lambda *command: session.run(*command, external=True, silent=True)  # noqa: E731
    source = run("apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages").split("\n")[0]
    site, release = source.split()
    run("debootstrap", "--variant=minbase", "--include=python3-venv,ca-certificates", release, str(root), site)
    session.run("python", "-m", "build", "--no-isolation", "--wheel", "-o", str(root / "wheel"), silent=True)
    # What pip needs of this machine: names, certificates, and the folders of wheels that it is told of.
    folders = [folder for folder in os.environ.get("PIP_FIND_LINKS", "").split() if Path(folder).is_dir()]
    for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt", *folders):
        target = root / path[1:]
        shutil.copytree(path, target) if Path(path).is_dir() else shutil.copyfile(path, target)
    (wheel,) = (root / "wheel").glob("*.whl")
    enter = ("unshare", "--root", str(root), "--mount-proc", "--pid", "--fork")
    inside = lambda *command: session.run(*enter, *command, external=True)  # noqa: E731
    inside("python3", "-m", "venv", "/pi")
    inside("/pi/bin/pip", "install", "--quiet", TORCH, f"/wheel/{wheel.name}[compile]")
    doctor = json.loads(run(*enter, "/pi/bin/pi-compile", "doctor", "--json"))
    recipe = doctor["bundled data"]["found"].partition(": ")[0] + "/recipes/demo.toml"
    inside("/pi/bin/pi-compile", "build", recipe, "-o", "/demo.pi")
    inside("/pi/bin/pi-run", "/demo.pi", "--prompt", "The list", "--max-tokens", "24")


def _use(session: nox.Session, scripts: Path) -> None:
    """Run what an installation can do without a checkpoint; place and plan name bundled profiles."""
    run = lambda *command: session.run(*command, external=True, silent=True)  # noqa: E731
    run(str(scripts / "pi-run"), "--version")
    doctor = json.loads(run(str(scripts / "pi-compile"), "doctor", "--json"))
    data = Path(doctor["bundled data"]["found"].partition(": ")[0])
    run(str(scripts / "pi-compile"), "place", str(data / "recipes/demo.toml"), "--locked")
    run(str(scripts / "pi-compile"), "plan", "facebook/opt-6.7b", "--machine", "pc-low")


@nox.session
def audit(session: nox.Session) -> None:
    """List all packages that an installation brings, with their licences, as an SBOM, and look for known faults.

    The SBOM is audit/sbom.json. Known faults come from PyPI's service over the network. Outside CI.
    """
    session.install(TORCH)
    session.install(".[compile,serve]")
    tools = session.create_tmp()
    session.run("python", "-m", "venv", f"{tools}/tools")
    session.run(f"{tools}/tools/bin/pip", "install", "-q", "cyclonedx-bom==7.5.0", "pip-audit==2.10.1", external=True)
    python = str(Path(session.bin, "python"))
    Path("audit").mkdir(exist_ok=True)
    sbom = ["environment", python, "--pyproject", "pyproject.toml", "--output-reproducible", "-o", "audit/sbom.json"]
    session.run(f"{tools}/tools/bin/cyclonedx-py", *sbom, external=True)
    site = session.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
    ask = [f"{tools}/tools/bin/pip-audit", "--path", str(site).strip(), "-f", "json", "--progress-spinner", "off"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    packages = json.loads(done.stdout)["dependencies"] if done.stdout.startswith("{") else []
    # pip-audit ends well where the service knows no package at all: a mirror of the registry may lack it.
    asked = [package for package in packages if "vulns" in package]
    if not asked:
        session.warn(f"known faults were NOT looked for, the service cannot be reached: {done.stderr.strip()[-300:]}")
    print(f"audit/sbom.json: {len(packages)} packages; {len(asked)} of them were looked up for known faults")
    if faulty := {p["name"]: [v["id"] for v in p["vulns"]] for p in asked if p["vulns"]}:
        session.error(f"known faults: {faulty}")


@nox.session
def identity(session: nox.Session) -> None:
    """Compare an engine's answers with those of the model alone: thousands of random requests. Outside CI: minutes."""
    session.install("-e", ".", *TEST_TOOLS)
    session.run("pytest", "-s", "tests/runtime/engine/test_identity.py", "--long", "--timeout", "0", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """Run what others wrote against the server: openai, llm-comply, schemathesis, lm-eval. Outside CI: minutes."""
    install_all(session)
    session.install("openai==3.54.0", "llm-comply==0.5.0", "schemathesis==4.32.5", "lm_eval[api]==0.4.13")
    files = ["tests/conformance", "tests/runtime/server/test_openai_client.py"]
    session.run("pytest", "-s", *files, *session.posargs)


@nox.session
def quantised(session: nox.Session) -> None:
    """Hold what is read of quantised checkpoints against the packages that write them. Outside CI: many packages."""
    session.install(TORCH)
    session.install("-e", ".[compile]", *TEST_TOOLS, "compressed-tensors==0.20.0", "loguru")
    # Without what it depends on, which is a newer torch: its own code for packing needs only these.
    needed = ("pypcre", "device-smi", "logbar", "tokenicer", "torchao", "threadpoolctl", "defuser")
    session.install("--no-deps", "gptqmodel==7.7.0", *needed)
    session.run("pytest", "tests/compile/checkpoint/quantised", *session.posargs)


@nox.session
def vocabularies(session: nox.Session) -> None:
    """Hold what is read of GGUF files' tokenizers and of chat templates against llama.cpp and transformers. Outside CI.

    llama.cpp's vocabularies and templates are in llama-cpp-python's source package, which is fetched and built: half an
    hour. `-- FOLDER` is one that is unpacked already; random texts are compared then where the package is installed.
    """
    session.install(TORCH)
    session.install("-e", ".[compile]")
    folder, *rest = session.posargs if session.posargs and Path(session.posargs[0]).is_dir() else ["", *session.posargs]
    if not folder:
        folder = llama_cpp_python(session)
        session.install("--no-binary", "llama-cpp-python", LLAMA_CPP_PYTHON)
    session.run("python", "tests/conformance/vocabularies.py", folder, *rest)
    session.run("python", "tests/support/published_templates.py", folder, env={"PYTHONPATH": "tests"})


@nox.session
def converted(session: nox.Session) -> None:
    """Hold what llama.cpp's own converter writes against transformers, and llama.cpp where LLAMA_CPP_PYTHON has it.

    The converter is in the source package of llama-cpp-python. Outside CI: a process for each of some 50 models.
    """
    session.install(TORCH)
    session.install("-e", ".[compile]", *TEST_TOOLS, "sentencepiece==0.2.1")
    (package,) = Path(llama_cpp_python(session)).glob("llama_cpp_python-*/")
    env = {"LLAMA_CPP_SOURCE": str(package / "vendor/llama.cpp")}
    session.run("pytest", "tests/compile/checkpoint/gguf/test_converted.py", *session.posargs, env=env)


def llama_cpp_python(session: nox.Session) -> str:
    """The folder into which the source package of llama-cpp-python is fetched and unpacked."""
    folder = str(Path(session.create_tmp()).resolve())
    session.run("pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder, LLAMA_CPP_PYTHON)
    shutil.unpack_archive(next(Path(folder).glob("*.tar.gz")), folder, filter="data")
    return folder


@nox.session
def peer_server(session: nox.Session) -> None:
    """Run llama.cpp's tests of its server against ours: `-- FOLDER MODEL`. Outside CI: some minutes.

    FOLDER is llama.cpp's `tools/server/tests`, MODEL a checkpoint or artifact of stories260K. Both may be left out: the
    folder is in the source package of llama-cpp-python, and the model comes from the hub.
    """
    session.install("-e", ".[compile,serve]", TORCH)
    session.install("pytest", "requests", "wget", "filelock", "openai", "aiohttp", "numpy", "prometheus-client")
    folder, model, *rest = [*session.posargs, *("", "")[len(session.posargs) :]]
    if not folder:
        folder = str(next(Path(llama_cpp_python(session)).glob("*/vendor/llama.cpp/tools/server/tests")))
    session.run("python", "tests/conformance/peer_server.py", folder, model or "ggml-org/test-model-stories260K", *rest)


@nox.session
def frameworks(session: nox.Session) -> None:
    """The examples for LangChain and llama-index against the server. Outside CI: these packages are large."""
    session.install("-e", ".[serve]", *TEST_TOOLS, "langchain-openai==1.7.3", "llama-index-llms-openai-like==0.8.1")
    session.run("pytest", "-W", "default", "tests/conformance/test_frameworks.py", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """64 clients on 4 slots for half an hour, half of whom leave: `-- --minutes 5` is shorter. Outside CI."""
    install_all(session)
    posargs = session.posargs or ["--minutes", "30"]
    session.run("pytest", "-s", "tests/runtime/server/test_soak.py", "--timeout", "0", *posargs)


@nox.session
def ptx(session: nox.Session) -> None:
    """GPU kernels as they are compiled, on an emulator of the GPU's instructions; prints the bytes that each moves.

    `-- --seed N` draws other orders of programs and warps. Outside CI, whose suite has a short form: many minutes.
    """
    install_all(session)
    env = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PI_TEST_EXAMPLES": "16"}
    tests, options = Path("tests/runtime/cuda"), ["--long", "--timeout", "0", *session.posargs]
    session.run("pytest", "-s", str(tests / "test_compiled_kernels.py"), *options, env=env)
    files = [str(tests / f"test_{name}.py") for name in ("kernels", "moe_kernels", "batches", "order_of_work")]
    session.run(*PYTEST, *files, *options, env=env)


@nox.session
def gpu_faults(session: nox.Session) -> None:
    """Plants faults in GPU kernels, one at a time, and runs each kernel's tests on the emulator: all must be caught.

    `-- --only _linear` takes those of a kernel. Outside CI: up to half an hour.
    """
    install_all(session)
    session.run("python", "tests/support/gpu_faults.py", *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session
def ports(session: nox.Session) -> None:
    """Compile every GPU kernel for NVIDIA's GPUs from sm_75 to sm_120, and for AMD's. Outside CI: minutes."""
    install_all(session)
    env = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    options = ["--long", "--timeout", "0", *session.posargs]
    session.run(*PYTEST, "-rP", "tests/runtime/cuda/test_ports.py", *options, env=env)


@nox.session
def mutations(session: nox.Session) -> None:
    """Plants 60 small faults, one at a time, and runs the tests of their rooms: fails where fewer than 85 % are caught.

    `-- --seed N` draws the same again, `-- --record FILE` goes on where a session ended. Outside CI: up to an hour.
    """
    install_all(session)
    session.run("python", "tests/support/mutations.py", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Damaged artifacts, files and disks for some minutes: `nox -s fuzz -- MINUTES`, 30 unless told. Outside CI."""
    install_all(session)
    minutes, *rest = session.posargs or ["30"]
    session.run("pytest", "-s", "tests/fuzz", "--minutes", minutes, "--timeout", "0", *rest)


@nox.session
def coverage(session: nox.Session) -> None:
    """The suite with the lines that it runs: fails below 92 %, and lists those that no test runs. Outside CI."""
    install_all(session)
    session.install("pytest-cov==7.1.0", *BROWSER_TOOLS)
    session.run(*PYTEST, "--cov", "--cov-report=term-missing:skip-covered", "--cov-fail-under=92", *session.posargs)


@nox.session
def workers(session: nox.Session) -> None:
    """Builds by many workers, killed at random, under every launcher. Outside CI: minutes, and Ray is large."""
    install_all(session)
    session.install("-e", ".[ray]")
    session.run("pytest", "-rP", "--long", "tests/compile/pipeline/test_many_workers.py", *session.posargs)
    session.run("pytest", "-W", "ignore", "tests/compile/workers/test_ray.py", *session.posargs)


@nox.session
def canary(session: nox.Session) -> None:
    """The suite on the newest numba, NumPy and torch, beyond what pyproject.toml allows. Outside CI: it may fail."""
    install_all(session)
    session.install("--upgrade", "--no-deps", "numba", "llvmlite", "numpy", "torch", *session.posargs)
    session.run(
        "python", "-c", "import numba, numpy, torch; print(numba.__version__, numpy.__version__, torch.__version__)"
    )
    session.run(*PYTEST)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks: `nox -s bench -- NAME [ARGUMENTS]` runs tests/benchmarks/NAME.py; without a name, lists them."""
    names = sorted(p.stem for p in Path("tests/benchmarks").glob("[a-z]*.py") if not p.stem.startswith("test_"))
    if not session.posargs or session.posargs[0] not in names:
        session.error(f"name one of: {', '.join(names)}")
    install_all(session)
    if session.posargs[0] in ("cpu", "batch", "serve", "disk", "quality", "real_files"):
        # The peer, built for this processor: the library, or programs of it.
        programs = {"serve": ["llama-server"], "quality": ["llama-quantize", "llama-imatrix"]}.get(
            session.posargs[0], []
        )
        session.install("gguf==0.19.0", *(["cmake==4.4.4"] if programs else []))
        build = ["tests/benchmarks/side_by_side/llama_cpp_build.py", "llama-cpp-python==0.3.36"]
        session.run_install("python", *build, *programs)
    paths = {"PYTHONPATH": os.pathsep.join(["tests", "recipes/demo"])}
    session.run("python", f"tests/benchmarks/{session.posargs[0]}.py", *session.posargs[1:], env=paths)


@nox.session
def showcase(session: nox.Session) -> None:
    """Measure four published models beside llama.cpp: `nox -s showcase -- FOLDER --write`, which has their files.

    Outside CI: it compiles llama.cpp, and measures for some forty minutes.
    """
    install_all(session)
    session.install("gguf==0.19.0", "cmake==4.4.4")
    build = ["tests/benchmarks/side_by_side/llama_cpp_build.py", "llama-cpp-python==0.3.36"]
    session.run_install("python", *build)
    session.run_install("python", *build, "llama-server")
    paths = {"PYTHONPATH": os.pathsep.join(["tests", "recipes/demo"])}
    session.run("python", "tests/benchmarks/showcase.py", *session.posargs, env=paths)
