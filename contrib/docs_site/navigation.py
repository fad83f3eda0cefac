"""What the site has, and where: its sections, their pages, and the names of the API reference.

`tests/docs/test_docs_site.py` holds that every page of `docs/` is here once, that README's list of
pages agrees, and that every public name of `turnwright` is in the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwright.config.names import ALGORITHMS


@dataclass(frozen=True)
class Section:
    """A group of pages: an entry of the site's head, with a page that lists what it has."""

    name: str
    """Name of its page's file."""
    title: str
    about: str
    pages: tuple[str, ...]
    """Paths in the repository, in order."""


@dataclass(frozen=True)
class Topic:
    """A page of the API reference."""

    name: str
    """Name of its page's file."""
    title: str
    about: str
    names: tuple[str, ...]
    """Names of objects and modules; one without a dot is of `turnwright`."""


SECTIONS = (
    Section(
        "start",
        "Start",
        "Install Turnwright, train an agent of your own, and learn the words.",
        (
            "docs/start.md",
            "docs/first_task.md",
            "docs/concepts.md",
            "docs/recipes.md",
            "docs/notebooks/1_first_rollout.ipynb",
            "docs/notebooks/2_train_and_curves.ipynb",
            "docs/notebooks/3_why_episodes_failed.ipynb",
            "docs/coming_from.md",
            "docs/mistakes.md",
            "docs/troubleshooting.md",
        ),
    ),
    Section(
        "write",
        "Write",
        "Environments, tools and rewards of your own, and code that exists already.",
        (
            "docs/environments.md",
            "docs/tools.md",
            "docs/rewards.md",
            "docs/play_functions.md",
            "docs/failures.md",
            "docs/libraries.md",
            "docs/agents.md",
            "docs/compat.md",
            "docs/convert.md",
            "docs/vision.md",
            "docs/templates.md",
        ),
    ),
    Section(
        "train",
        "Train and operate",
        "Choose an algorithm, use servers and many machines, and watch what a run does.",
        (
            "docs/training.md",
            "docs/scheduling.md",
            "docs/low_precision.md",
            "docs/engines.md",
            "docs/scaling.md",
            "docs/containers.md",
            "docs/runs.md",
            "docs/viewer.md",
            "docs/metrics.md",
            "docs/real_models.md",
            "docs/own_trainer.md",
            "docs/integrations.md",
        ),
    ),
    Section(
        "understand",
        "Understand",
        "How it works, what it promises, what was measured, and why it is as it is.",
        (
            "docs/algorithm.md",
            "docs/architecture.md",
            "docs/guarantees.md",
            "docs/security.md",
            "docs/benchmarks.md",
            "benchmarks/results/README.md",
            "benchmarks/results/figures.md",
            "benchmarks/results/papers.md",
            "docs/decisions.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
        ),
    ),
    Section(
        "reference",
        "Reference",
        "Every key, metric, template and public name.",
        (
            "docs/reference/keys.md",
            "docs/reference/metrics.md",
            "docs/template_table.md",
            "docs/reference/rows.md",
            "docs/reference/schemas.md",
            "docs/reference/prompts.md",
            "docs/reference/curriculum.md",
            "docs/reference/policies.md",
            "docs/reference/teachers.md",
            "docs/reference/servers.md",
            "docs/reference/workers.md",
            "docs/reference/answers.md",
            "docs/reference/dependencies.md",
            "docs/reference/capabilities.md",
            "docs/reference/examples.md",
            "docs/reference/convert.md",
        ),
    ),
)

TOPICS = (
    Topic(
        "environments",
        "Environments and tasks",
        "What a user writes, and where its tasks come from.",
        (
            *("Env", "Step", "Action", "InlineObservation", "NewHistory"),
            *("Task", "load_tasks", "EnvSpec", "as_env_spec", "resolve_env"),
            *("gym_env", "simulated_user"),
            *("turnwright_compat.openenv_env", "turnwright_compat.verifiers_env"),
            *("turnwright_serve.program", "turnwright_serve.ProgramResult"),
        ),
    ),
    Topic(
        "tools",
        "Tools and sandboxes",
        "Functions that the model calls, and programs that it writes.",
        (
            *("tool_env", "tool", "Tool", "ToolCall", "StatefulTool", "mcp_tools"),
            *("arithmetic", "Sandbox", "python_tool"),
        ),
    ),
    Topic(
        "rewards",
        "Rewards and judges",
        "What an episode earned, in parts, and models that judge it.",
        (
            *("rewards", "Rewards", "RewardPart", "Scores"),
            *("judged", "Judge", "ChatJudge", "EngineJudge"),
        ),
    ),
    Topic(
        "rollouts",
        "Rollouts",
        "Play episodes, with limits, retries and agent functions.",
        (
            *("rollout", "arollout", "Rollout", "RolloutSettings"),
            *("Limits", "EnvRules", "RetryRules", "Model", "Reply"),
        ),
    ),
    Topic(
        "trajectories",
        "Trajectories",
        "The record of an episode: its turns, its ids, and how it ended.",
        (
            *("Trajectory", "Turn", "Span", "Origin", "Sample", "Group", "EpisodeKey"),
            *("StopReason", "Failure", "FailureKind"),
        ),
    ),
    Topic(
        "messages",
        "Messages, images and videos",
        "What is said, and pictures in it.",
        (
            *("Message", "Image", "Video", "ImageRef", "VideoRef"),
            *("MediaPlacement", "MediaStore", "MediaLimits"),
        ),
    ),
    Topic(
        "engines",
        "Engines",
        "What samples tokens: in this process, on servers, or from a script.",
        (
            *("Engine", "Request", "Generation", "StopText"),
            *("Sampling", "SamplingDistribution", "token_logprobs"),
            *("ScriptedEngine", "PolicyEngine", "turnwright.engines.local.LocalEngine"),
            "turnwright.engines.remote.VllmEngine",
            "turnwright.engines.remote.SglangEngine",
            "turnwright.engines.remote.LlamaCppEngine",
            "turnwright.engines.remote.ChatEngine",
            "turnwright.engines.remote.Fleet",
            "turnwright.engines.remote.FleetSettings",
            "turnwright.engines.remote.WeightDelivery",
            "turnwright.engines.remote.connect",
            "turnwright.engines.remote.probe_server",
        ),
    ),
    Topic(
        "renderers",
        "Renderers",
        "Messages to token ids, and replies back to messages.",
        ("Renderer", "Extend", "Branch", "byte_renderer", "load_renderer"),
    ),
    Topic(
        "training",
        "Training and evaluation",
        "Train from Python, and what an algorithm or a trainer of your own is made of.",
        (
            *("train", "tiny", "evaluate", "EvaluationResult", "turnwright.simple.learn"),
            "turnwright.training.Trainer",
            "turnwright.training.StepResult",
            "turnwright.training.Credit",
            "turnwright.training.make_batch",
            "turnwright.training.LossDenominator",
            "turnwright.training.algorithms.Algorithm",
            "turnwright.training.algorithms.TokenBatch",
            "turnwright.training.algorithms.TokenLoss",
            "turnwright.training.algorithms.clipped",
        ),
    ),
    Topic(
        "algorithms",
        "Algorithms",
        "Each with its formula and source; the keys that it sets are in the table of training.",
        tuple(f"turnwright.training.algorithms.{name}" for name in ALGORITHMS),
    ),
    Topic(
        "runs",
        "Runs and records",
        "Read a run's directory: its metrics, episodes and groups; replays and trackers.",
        (
            "load_run",
            "turnwright.saved_runs.Run",
            "turnwright.saved_runs.Metrics",
            "turnwright.saved_runs.Columns",
            "turnwright.saved_runs.HeldOutSuccess",
            "turnwright.saved_runs.SavedEpisodes",
            "turnwright.saved_runs.SavedEpisode",
            "turnwright.saved_runs.Groups",
            "turnwright.records.RunDir",
            "turnwright.records.rebuild_trajectories",
            "turnwright.records.trajectory_row",
            "turnwright.records.rollout_metrics",
            "turnwright.trackers.Tracker",
            *("turnwright_view.replay_loop", "turnwright_view.ReplayResult"),
        ),
    ),
    Topic(
        "integrations",
        "Inside other trainers",
        "Our rollouts as the rollout of another trainer.",
        (
            "turnwright_compat.trl.rollout.TurnwrightRollout",
            "turnwright_compat.trl.rollout.turnwright_reward",
            "turnwright_compat.skyrl.rollout.SkyRLEpisodes",
            "turnwright_compat.skyrl.rollout.TurnwrightGenerator",
            "turnwright_compat.verl.rollout.VerlEpisodes",
            "turnwright_compat.verl.rollout.TurnwrightAgentLoop",
            "turnwright_compat.slime.rollout.SlimeEpisodes",
            "turnwright_compat.slime.rollout.make_generate",
            "turnwright_compat.swift.rollout.SwiftEpisodes",
            "turnwright_compat.swift.rollout.make_scheduler",
        ),
    ),
    Topic(
        "errors",
        "Exceptions",
        "What is raised, and by whom.",
        (
            *("TurnwrightError", "UsageError"),
            "turnwright.errors.ConfigError",
            "turnwright.errors.ModelError",
            "turnwright.errors.TemplateError",
            "turnwright.errors.ControlTextError",
            "turnwright.errors.TaskError",
            "turnwright.errors.NotTrainable",
            *("EnvError", "MediaError", "ProcessDied", "ServerError", "InvalidAction"),
            *("RewardError", "JudgeError", "RepeatedUserError", "ToolFailure", "LimitReached"),
            "EngineError",
            "turnwright.errors.BackendContractError",
            "turnwright.errors.StaleWeights",
            "turnwright.errors.EngineUnavailable",
            "turnwright.errors.SyncError",
            "turnwright.errors.RoutesMissing",
            "turnwright.errors.TraceError",
        ),
    ),
)


def full_name(name: str) -> str:
    """Return the name that imports a name of a topic."""
    return name if "." in name else f"turnwright.{name}"
