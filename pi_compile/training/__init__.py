"""The train stage: predictors are fitted, and each layer is given the quickest rung that keeps the quality budget."""

from pi_compile.training.candidates import TrainSpec
from pi_compile.training.stage import Texts, train_predictors, training_work
from pi_compile.training.work_estimate import TrainingWork
