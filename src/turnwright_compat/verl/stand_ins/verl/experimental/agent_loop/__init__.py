"""Agent loops."""

from .agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "register"]
