"""Training: credit assignment, loss, optimizer, checkpoints and models.

The package with the tensors.
"""

from typing import TYPE_CHECKING

from turnwright._lazy import lazy_names

if TYPE_CHECKING:
    from turnwright.training.algorithms import resolve_settings as resolve_settings
    from turnwright.training.checkpoint import Checkpoints as Checkpoints
    from turnwright.training.credit import Credit as Credit
    from turnwright.training.forward.batch import LossDenominator as LossDenominator
    from turnwright.training.forward.batch import make_batch as make_batch
    from turnwright.training.forward.forward import LogitDistribution as LogitDistribution
    from turnwright.training.forward.prefix_tree import build_prefix_tree as build_prefix_tree
    from turnwright.training.forward.ranks import Ranks as Ranks
    from turnwright.training.loss_weights import trainable_tokens as trainable_tokens
    from turnwright.training.model.lora import add_lora as add_lora
    from turnwright.training.model.models import create_tiny_model as create_tiny_model
    from turnwright.training.model.weight_export import unique_weights as unique_weights
    from turnwright.training.run import TrainingRun as TrainingRun
    from turnwright.training.servers import make_adapter_engines as make_adapter_engines
    from turnwright.training.servers import score_with_model as score_with_model
    from turnwright.training.setup import load_model_and_renderer as load_model_and_renderer
    from turnwright.training.setup import make_engine as make_engine
    from turnwright.training.task_plan import TaskPlan as TaskPlan
    from turnwright.training.trainer.trainer import StepResult as StepResult
    from turnwright.training.trainer.trainer import Trainer as Trainer
    from turnwright.training.untrained_reasons import TRAINED as TRAINED
    from turnwright.training.weight_transfer import GroupWeightPacker as GroupWeightPacker
    from turnwright.training.weight_transfer import RequestWeightPacker as RequestWeightPacker

if not TYPE_CHECKING:
    __all__, __getattr__ = lazy_names(__name__, __file__)
