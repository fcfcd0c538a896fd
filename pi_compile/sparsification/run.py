"""`pi-compile sparsify`: the whole way from a recipe to a folder.

What is done so far lies in `FOLDER.work`, so that a run that was killed goes on where it was: checkpoints of the model
and of the control, and the folder to be. The last checkpoints stay in `FOLDER.checkpoint`. With several processes each
calls `sparsify`, and the first one writes.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from pi_compile.checkpoint import Checkpoint
from pi_compile.errors import TrainingError
from pi_compile.evaluation.window_scores import increase_interval
from pi_compile.files import json_digest, write_text
from pi_compile.sparsification import export, trackers
from pi_compile.sparsification.activation import Activation, FfnActivity
from pi_compile.sparsification.checkpoints import (
    CONTROL,
    IDENTITY,
    MODEL,
    Checkpoints,
    Start,
    keep,
    kept_of,
    start_from,
)
from pi_compile.sparsification.data import EvaluationText, Packing, open_mixture, read_evaluation_text, source_digests
from pi_compile.sparsification.estimate import check_room, estimate
from pi_compile.sparsification.evaluation import Evaluation, evaluate
from pi_compile.sparsification.export import model_card
from pi_compile.sparsification.model import add_constants, load_model, open_base, packing_of
from pi_compile.sparsification.page import curves_charts, curves_page, curves_table, pictures
from pi_compile.sparsification.recipe import SparsifyRecipe, read_sparsify_recipe
from pi_compile.sparsification.training import Base, Point, Trained, Training, Watch
from pi_compile.workers import StageDoneError, Worker, WorkFolder
from pi_runtime.errors import Setting, UsageError

_CHECKED = 64
"""Tokens on which the folder is compared with the trained model."""


@dataclass(frozen=True)
class Arm:
    """A training and what came of it: the model, or the control."""

    trained: Trained
    losses_N: np.ndarray[Any, Any]
    """Loss in each window of the held-out text."""
    facts: dict[str, Any]

    def to_json(self) -> str:
        """The text that `read_arm` takes."""
        return json.dumps({**asdict(self), "losses_N": self.losses_N.tolist()})


def read_arm(path: Path) -> Arm:
    """The training that a file keeps."""
    found = json.loads(path.read_text(encoding="utf-8"))
    trained = found["trained"]
    trained["points"] = [Point(**point) for point in trained["points"]]
    return Arm(Trained(**trained), np.array(found["losses_N"]), found["facts"])


def run_record(recipe: SparsifyRecipe, base: Evaluation, model: Arm, control: Arm | None) -> dict[str, Any]:
    """What came of a run, as the folder's record says it."""
    against = base.losses_N if control is None else control.losses_N
    interval = increase_interval(model.losses_N, against)
    facts, trained = model.facts, model.trained
    return {
        "activation": recipe.target.activation,
        "perplexity": {
            "base": base.perplexity,
            "model": facts["perplexity"],
            "control": None if control is None else control.facts["perplexity"],
        },
        "perplexity_increase": float(np.expm1(model.losses_N.mean() - against.mean())),
        "interval": None if interval is None else list(interval),
        **{name: value for name, value in facts.items() if name != "perplexity"},
        **{name: getattr(trained, name) for name in ("steps", "ended", "schedule", "tokens", "seconds")},
    }


def sparsify(
    recipe_path: Path, output: Path, device: str = "cpu", watch: Watch = Watch(), track: Sequence[str] = ()
) -> dict[str, Any]:
    """Make a model sparse, and write a Hugging Face folder. Returns what the folder's record says.

    `track` names trackers that accelerate knows. Raises UsageError for an output that is there, a tracker that is not,
    or `cuda:all` in one process, DoesNotFitError where the disk is too small, and what reading the recipe, the
    checkpoint and the text, and training, raise.
    """
    recipe = read_sparsify_recipe(recipe_path)
    return carry_out(recipe, recipe_path.resolve().parent, output, device, watch, track)


def resume(
    finished: Path, steps: int, output: Path, device: str = "cpu", watch: Watch = Watch(), track: Sequence[str] = ()
) -> dict[str, Any]:
    """Train the model of a finished run for so many steps more, and write another folder, as `sparsify` does.

    The learning rate stays what it fell to. Raises UsageError where the run's last checkpoints are gone.
    """
    start = start_from(finished, steps)
    return carry_out(start.recipe, start.folder, output, device, watch, track, start=start)


def carry_out(
    recipe: SparsifyRecipe,
    folder: Path,
    output: Path,
    device: str,
    watch: Watch,
    track: Sequence[str],
    *,
    start: Start | None = None,
) -> dict[str, Any]:
    """Carry out a recipe whose paths are relative to `folder`."""
    export.check_folder(output)
    if device.startswith("cuda:") and "LOCAL_RANK" not in os.environ:  # a launcher gives each process its own
        if device == "cuda:all":
            raise UsageError(
                "one process trains on one GPU",
                setting=Setting("device", device),
                expected="cpu or cuda:N",
                remedy="accelerate launch -m pi_compile sparsify … starts a process for each GPU",
            )
        torch.cuda.set_device(int(device.removeprefix("cuda:")))
    accelerator = Accelerator(cpu=device == "cpu", log_with=trackers.chosen(track) or None, project_dir=".")
    _check_shares(recipe, accelerator.num_processes)
    if not accelerator.is_main_process:
        watch = Watch()
    run = _Sparsification(recipe, folder, output, accelerator, watch, start)
    with run.held():
        return run.carry_out()


def _check_shares(recipe: SparsifyRecipe, processes: int) -> None:
    """Raise UsageError where a batch cannot be shared out evenly: its sequences would not count alike."""
    train = recipe.train
    if train.batch % (processes * train.micro_batch):
        raise UsageError(
            f"train.batch = {train.batch} cannot be shared by {processes} processes",
            expected=f"a multiple of {processes} × train.micro_batch, {processes * train.micro_batch}",
            remedy="change train.batch or train.micro_batch, or start fewer processes",
        )


@dataclass(frozen=True)
class _Sparsification:
    recipe: SparsifyRecipe
    folder: Path
    output: Path
    accelerator: Accelerator
    watch: Watch
    start: Start | None = None

    @property
    def work(self) -> Path:
        """Where everything lies that is not finished."""
        return self.output.with_name(self.output.name + ".work")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no other run work in the same folder, which goes when the run is done.

        Raises UsageError if another run has finished it meanwhile, and for a folder of something else.
        """
        if not self.accelerator.is_main_process:
            yield
            return
        workers = self.work / "workers"
        self.work.mkdir(parents=True, exist_ok=True)
        for folder in (self.work, kept_of(self.output)):
            ours = not folder.exists() or (folder / IDENTITY).exists() or (folder / workers.name).exists()
            if not ours and any(folder.iterdir()):
                raise UsageError(
                    f"{folder}: is not of a training, and would be removed at its end",
                    remedy=("name another ", Setting("output"), ", or move the folder away"),
                )
        try:
            with (
                Worker(workers, notice=self.watch.notice) as worker,
                WorkFolder(self.work, worker, self.output.exists).held("run"),
            ):
                yield
        except StageDoneError:
            with suppress(OSError):  # who holds the folder removes it, unless this worker showed itself after that
                workers.rmdir()
                self.work.rmdir()
            export.check_folder(self.output)
        shutil.rmtree(self.work, ignore_errors=True)

    @cached_property
    def base(self) -> Checkpoint:
        """The checkpoint to be made sparse."""
        return open_base(self.recipe.model, self.folder)

    @cached_property
    def packing(self) -> Packing:
        """How text becomes sequences."""
        return packing_of(self.base, self.recipe.train.window)

    @cached_property
    def texts(self) -> EvaluationText:
        """Text that is not trained on."""
        return read_evaluation_text(self.recipe.corpus, self.folder, self.packing)

    def carry_out(self) -> dict[str, Any]:
        """All of it, or what is left."""
        began = time.time()
        sources = source_digests(self.recipe.corpus, self.folder)
        needed = estimate(self.recipe, self.base.decoder, self.accelerator, self.start.after if self.start else 0)
        check_room(needed, self.output, self.work)
        self._identify(sources)
        self.watch.notice(needed.words())
        base, base_perplexity = self._evaluated_base()
        model = self._arm(MODEL, lambda path: self._train_model(base_perplexity, path))
        control = (
            self._arm(CONTROL, lambda _: self._train_control(model.trained.steps)) if self.recipe.run.control else None
        )
        record = {**run_record(self.recipe, base, model, control), **self._circumstances(base, model, sources)}
        if self.accelerator.is_main_process:
            self._publish(record, base_perplexity, model, control)
        self.accelerator.wait_for_everyone()
        self.watch.notice(f"{self.output}: written in {time.time() - began:,.0f} s")
        return {"folder": str(self.output), **record}

    def _identify(self, sources: dict[str, str]) -> None:
        """Write down what this run is, or check that the one that was begun here is the same."""
        path = self.work / IDENTITY
        inputs = {"recipe": self.recipe.model_dump(), "model": self.base.digest(), "sources": sources}
        if self.start is not None:
            before = self.start.inputs
            if any(before[key] != inputs[key] for key in ("model", "sources")):
                raise TrainingError(
                    f"{self.start.kept}: is of another model or text",
                    expected="the files that the finished run was made from, unchanged",
                    remedy="bring them back, or make the folder anew",
                )
            inputs["resumed"] = {"digest": before["digest"], "after": self.start.after}
        if not path.exists():
            if self.accelerator.is_main_process:
                write_text(path, json.dumps({"digest": json_digest(inputs), **inputs}, indent=1))
        elif json.loads(path.read_text(encoding="utf-8"))["digest"] != json_digest(inputs):
            raise TrainingError(
                f"{self.work}: holds a training with another recipe, model or text",
                expected="the run that was begun there",
                remedy="name another output, or remove the folder",
            )
        self.accelerator.wait_for_everyone()

    def _evaluated_base(self) -> tuple[Evaluation, float]:
        """What the base does on the held-out text, and its perplexity on the tune text."""
        model = self.accelerator.prepare_model(load_model(self.base), evaluation_mode=True)
        autocast = self.recipe.train.dtype == "bf16"
        found = evaluate(self.accelerator, model, None, self.texts.held_out, autocast)
        tuned = evaluate(self.accelerator, model, None, self.texts.tune, autocast)
        self.accelerator.free_memory()
        return found, tuned.perplexity

    def _arm(self, name: str, make: Callable[[Path], Arm]) -> Arm:
        """A finished arm: made now, or read where it was made before."""
        path = self.work / f"{name}.json"
        if not path.exists():
            arm = make(self.work / f"{name}.out")
            trackers.finish(self.accelerator)
            if self.accelerator.is_main_process:
                write_text(path, arm.to_json())
                Checkpoints(self.work / name, self.accelerator).keep_only(arm.trained.steps)
            self.accelerator.free_memory()
            self.accelerator.wait_for_everyone()
        return read_arm(path)

    def _training(self, name: str, model: Any, activity: FfnActivity | None, base: Base = Base()) -> Training:
        checkpoints = Checkpoints(self.work / name, self.accelerator)
        if self.start is not None:
            checkpoints.begin_with(self.start.checkpoint(name))
        trackers.start(self.accelerator, self.output.name, name, self.work / "events", self.recipe)
        return Training(
            self.recipe,
            self.accelerator,
            model,
            activity,
            open_mixture(self.recipe.corpus, self.folder, self.texts.left_out(self.packing), self.recipe.train.seed),
            self.texts,
            checkpoints,
            base,
            watch=trackers.both(self.watch, self.accelerator),
            name=name,
        )

    def _train_model(self, base_perplexity: float, out: Path) -> Arm:
        """Train the model with its new activation, choose a threshold, and save it to `out`."""
        target = self.recipe.target
        model = load_model(self.base)
        activity = FfnActivity(Activation(target.activation))
        activity.install(model)
        if target.constant:
            add_constants(model)
        original = self._original() if self.recipe.train.distillation else None
        training = self._training(MODEL, model, activity, Base(original, base_perplexity))
        until = self.start.after + self.start.steps if self.start else None
        trained = training.run(until, self.start.after if self.start else 0)
        if self.recipe.steer.sparsity and target.activation == "fatrelu":
            activity.share_threshold(self.accelerator.unwrap_model(training.model))
        export.round_weights(training.model, export.stored_dtype(self.base))
        thresholds = self._choose_threshold(training, activity)
        state = self.accelerator.get_state_dict(training.model)
        found = training.evaluate(tune=False)
        probe_W = torch.from_numpy(self.texts.held_out[0, :_CHECKED])
        with torch.no_grad():
            wanted_WV = training.model.eval()(probe_W[None].to(self.accelerator.device)).logits[0].float().cpu()
        activation = Activation(target.activation, activity.thresholds[0])  # the same in all layers by now
        facts = {**found.facts(), "threshold": activation.threshold, "thresholds": thresholds}
        if self.accelerator.is_main_process:
            unwrapped = self.accelerator.unwrap_model(training.model)
            shutil.rmtree(out, ignore_errors=True)  # of a run that was killed before it wrote the arm down
            with export.new_folder(out) as folder:
                form = export.save_model(unwrapped, state, self.base, activation, folder)
                difference = export.check_model(folder, probe_W, wanted_WV, self.base.decoder)
            facts |= {"stock": form.stock, "form": form.words, "difference": difference}
        return Arm(trained, found.losses_N, facts)

    def _original(self) -> Any:
        original = load_model(self.base).requires_grad_(False).eval()
        return original.to(self.accelerator.device)

    def _choose_threshold(self, training: Training, activity: FfnActivity) -> list[dict[str, float]]:
        """Take the sparsest of FATReLU's thresholds within the allowed loss on the tune text; return what each does."""
        target, rows = self.recipe.target, []
        for threshold in sorted({0.0, *target.thresholds}) if target.thresholds else ():
            activity.thresholds = [threshold] * len(activity.layers)
            found = training.evaluate(tune=True)
            rows.append({"threshold": threshold, "perplexity": found.perplexity, "sparsity": found.sparsity})
        if rows:
            allowed = rows[0]["perplexity"] * (1 + target.threshold_loss)
            best = [row["threshold"] for row in rows if row["perplexity"] <= allowed][-1]
            activity.thresholds = [best] * len(activity.layers)
        return rows

    def _train_control(self, steps: int) -> Arm:
        """Train the model with its own activation on the same text."""
        training = self._training(CONTROL, load_model(self.base), None)
        trained = training.run(steps)
        found = training.evaluate(tune=False)
        return Arm(trained, found.losses_N, found.facts())

    def _circumstances(self, base: Evaluation, model: Arm, sources: dict[str, str]) -> dict[str, Any]:
        """What the folder's record says beside what came out."""
        return {
            "resumed_after": self.start.after if self.start else 0,
            "processes": self.accelerator.num_processes,
            "base": {"model": self.recipe.model.path, "digest": self.base.digest()},
            "text": {"sources": sources, "position": model.trained.data},
            "held_out": {"windows": len(base.losses_N), "tokens": int(self.texts.held_out.size)},
            "recipe": self.recipe.model_dump(),
        }

    def _publish(self, record: dict[str, Any], base_perplexity: float, model: Arm, control: Arm | None) -> None:
        """Complete the folder, and bring it to its place."""
        out = self.work / f"{MODEL}.out"
        (out / export.RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (out / "SPARSIFY.toml").write_text(self.recipe.to_toml(), encoding="utf-8")
        (out / "README.md").write_text(model_card(record, self.base.folder), encoding="utf-8")
        points = () if control is None else control.trained.points
        charts = curves_charts(record, base_perplexity, model.trained.points, points)
        (out / "training.html").write_text(curves_page(record, charts, model.trained.points), encoding="utf-8")
        for name, picture in pictures(charts).items():
            (out / f"{name}.png").write_bytes(picture)
        (out / "curves.csv").write_text(curves_table(model.trained.points, points), encoding="utf-8")
        if (self.work / "events").is_dir():
            # A run that was killed here may have left a part of them.
            shutil.copytree(self.work / "events", out / "events", dirs_exist_ok=True)
        export.check_folder(self.output)  # hours have passed
        self.watch.notice(keep(self.work, self.output, model.trained.steps, self.folder))
        out.rename(self.output)
