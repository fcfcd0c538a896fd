"""How good an artifact is: perplexity, agreement with the checkpoint, and accuracy on tasks, in each mode."""

from pi_compile.evaluation.fidelity import LoadOptions, evaluate
from pi_compile.evaluation.task_accuracy import evaluate_tasks
from pi_compile.evaluation.task_files import Task, read_task
