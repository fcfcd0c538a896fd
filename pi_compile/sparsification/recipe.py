"""SPARSIFY.toml: a model, an activation and a training, as a complete and strict file.

`docs/how-to/sparsify.md` explains the keys. Paths are relative to the recipe.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

from pydantic import Field, ValidationInfo, field_validator

from pi_compile.errors import RecipeError
from pi_compile.recipe import ModelSection, RecipeFile, Section, read_toml
from pi_runtime.errors import Setting, UsageError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral")
"""Models whose FFNs can take another activation."""
Curve = Literal["constant", "linear", "sine"]
Activation = Literal["relu", "drelu", "relu2", "fatrelu"]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MixtureSection(Section):
    """Text to train on, the tune text, and the held-out text."""

    text: Annotated[list[str], Field(min_length=1)]
    """Paths or globs, `python`, or `hub:OWNER/NAME@REVISION`, as in a recipe of `build`."""
    weights: list[Positive]
    """How often a sequence comes from each source, relative to the others."""
    report: list[str]
    """Sources of the held-out text; empty: one passage in 20 of `text`, which is never trained on."""
    field: str
    """Column that holds the text where the data has columns."""
    tune_tokens: Annotated[int, Field(ge=64)]
    """Tokens of the tune text, which evaluations during the training, steering and thresholds look at."""
    report_tokens: Annotated[int, Field(ge=64)]
    """Tokens of the held-out text, which the figures at the end are of."""

    @field_validator("text")
    @classmethod
    def _once(cls, text: list[str]) -> list[str]:
        if len(set(text)) < len(text):
            raise ValueError("should name each source once: weights say how often it is taken")
        return text

    @field_validator("weights")
    @classmethod
    def _one_each(cls, weights: list[float], info: ValidationInfo) -> list[float]:
        if "text" in info.data and len(weights) != len(info.data["text"]):
            raise ValueError(f"should have one number for each of the {len(info.data['text'])} sources of text")
        return weights


class TargetSection(Section):
    """What the FFNs become."""

    activation: Activation
    """`relu`, `drelu` (gate and up both cut off at 0), `relu2`, or `fatrelu`: relu with a threshold above 0."""
    constant: bool
    """Train a constant vector for each layer beside its FFN, as the bias of its down projection (Llama only)."""
    thresholds: list[NotNegative]
    """FATReLU's thresholds to choose from at the end; empty for others, and where `steer.sparsity` finds one."""
    threshold_loss: NotNegative
    """Largest relative increase of perplexity that the threshold may cost."""

    @field_validator("thresholds")
    @classmethod
    def _of_fatrelu(cls, thresholds: list[float], info: ValidationInfo) -> list[float]:
        if thresholds and info.data.get("activation", "fatrelu") != "fatrelu":
            raise ValueError("should be empty unless activation is fatrelu")
        return thresholds


class StageSection(Section):
    """A stretch of the training, through which the penalty's weight goes from the stage before to its own."""

    steps: Annotated[int, Field(ge=1)]
    penalty: NotNegative
    """Weight of the penalty at the end of the stage: of the mean magnitude of all neurons, tokens and layers."""
    curve: Curve
    """`constant` has the weight from the stage's beginning; `linear` and `sine` rise to it."""


class SparsifyTrainSection(Section):
    """How the model is trained."""

    window: Annotated[int, Field(ge=8)]
    """Tokens of one sequence."""
    batch: Annotated[int, Field(ge=1)]
    """Sequences of one step, of all processes together."""
    micro_batch: Annotated[int, Field(ge=1)]
    """Sequences of one forward pass of one process; gradients are accumulated up to `batch`."""
    learning_rate: Positive
    final_learning_rate: NotNegative
    """What the learning rate falls to, on a cosine."""
    warmup_steps: Annotated[int, Field(ge=0)]
    """Steps through which the learning rate rises from 0."""
    weight_decay: NotNegative
    clip: Positive
    """Largest norm of a step's gradient."""
    distillation: NotNegative
    """Weight of the divergence (KL) from the original model's predictions; 0 does without the original in memory."""
    dtype: Literal["f32", "bf16"]
    """`bf16` computes products in bfloat16; weights and optimiser stay in float32."""
    activation_checkpointing: bool
    """Compute each layer twice rather than hold its activations."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of the order of the text."""

    @field_validator("micro_batch")
    @classmethod
    def _divides(cls, micro_batch: int, info: ValidationInfo) -> int:
        if "batch" in info.data and info.data["batch"] % micro_batch:
            raise ValueError(f"should divide batch, {info.data['batch']}")
        return micro_batch


class SteerSection(Section):
    """A wanted sparsity, for which the penalty's weight, or the threshold of `fatrelu`, is set while training."""

    sparsity: Share
    """Share of neurons that are 0; 0 leaves it to the stages and thresholds."""


class StopSection(Section):
    """When to end before the last step."""

    sparsity: Share
    """End when this share of neurons is 0 on the tune text; 0 for never."""
    perplexity_ratio: NotNegative
    """End, with the weights before, when perplexity on the tune text has been below this many times the original's
    and exceeds it again; 0 for never."""


class RunSection(Section):
    """What is done beside training."""

    every: Annotated[int, Field(ge=1)]
    """Steps between two evaluations, each with a checkpoint."""
    control: bool
    """Train the unchanged model on the same text too, to tell what sparsity costs."""


class SparsifyRecipe(RecipeFile):
    """A model to be made sparse."""

    model: ModelSection
    corpus: MixtureSection
    target: TargetSection
    stages: Annotated[list[StageSection], Field(min_length=1)]
    train: SparsifyTrainSection
    steer: SteerSection
    stop: StopSection
    run: RunSection

    @property
    def steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def with_steps(self, steps: int) -> "SparsifyRecipe":
        """The recipe with at least so many steps: the last ones keep the last stage's penalty."""
        if steps <= self.steps:
            return self
        more = StageSection(steps=steps - self.steps, penalty=self.stages[-1].penalty, curve="constant")
        return self.model_copy(update={"stages": [*self.stages, more]})

    def tokens(self, after: int = 0) -> int:
        """Tokens that all steps train on, but for the first ones, that are done."""
        return (self.steps - after) * self.train.batch * self.train.window


def default_sparsify_recipe(
    model: str,
    *,
    activation: str = "fatrelu",
    revision: str = "",
    corpus: Sequence[str] = ("python",),
    ignore_config: Sequence[str] = (),
) -> SparsifyRecipe:
    """The recipe that `init --sparsify` writes: a threshold steered to 85 %, beside the original's predictions.

    With another activation it is a penalty that rises in sine steps as ProSparse's does. Raises UsageError for an
    activation that is none of a sparse model.
    """
    if activation not in (known := get_args(Activation)):
        raise UsageError(setting=Setting("activation", activation), expected=" or ".join(known))
    steered = activation == "fatrelu"
    rising = [StageSection(steps=300, penalty=penalty, curve="sine") for penalty in (0.1, 0.3, 1.0)]
    return SparsifyRecipe(
        model=ModelSection(path=model, revision=revision, ignore_config=list(ignore_config)),
        corpus=MixtureSection(
            text=list(corpus),
            weights=[1.0] * len(corpus),
            report=[],
            field="text",
            tune_tokens=16_384,
            report_tokens=65_536,
        ),
        target=TargetSection(
            activation=cast("Activation", activation), constant=False, thresholds=[], threshold_loss=0.001
        ),
        stages=[
            StageSection(steps=1000 if steered else 100, penalty=0.0, curve="constant"),
            *([] if steered else rising),
        ],
        train=SparsifyTrainSection(
            window=512,
            batch=16,
            micro_batch=4,
            learning_rate=5e-5,
            final_learning_rate=5e-6,
            warmup_steps=50,
            weight_decay=0.1,
            clip=1.0,
            distillation=1.0 if steered else 0.0,
            dtype="f32",
            activation_checkpointing=False,
            seed=0,
        ),
        steer=SteerSection(sparsity=0.85 if steered else 0.0),
        stop=StopSection(sparsity=0.0, perplexity_ratio=0.0),
        run=RunSection(every=100, control=True),
    )


def read_sparsify_recipe(path: Path) -> SparsifyRecipe:
    """Read and check a SPARSIFY.toml. Raises RecipeError naming every problem with its key."""
    recipe = read_toml(path, SparsifyRecipe, "pi-compile init MODEL --sparsify", "docs/how-to/sparsify.md")
    if recipe.train.warmup_steps >= recipe.steps:
        raise RecipeError(
            f"{path}: train.warmup_steps",
            expected=f"less than the {recipe.steps} steps of all stages",
            found=recipe.train.warmup_steps,
            remedy="lower it, or raise the steps of a stage",
        )
    if recipe.target.activation == "fatrelu" and bool(recipe.target.thresholds) == bool(recipe.steer.sparsity):
        raise RecipeError(
            f"{path}: target.activation = fatrelu",
            expected="target.thresholds to choose from, or steer.sparsity, which finds a threshold, and not both",
            found=f"thresholds = {recipe.target.thresholds}, sparsity = {recipe.steer.sparsity:g}",
            remedy="set one of them, and the other to [] or 0.0",
        )
    return recipe
