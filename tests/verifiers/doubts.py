"""A taskset of `verifiers` for tests: sums with a tool that adds, and a user who asks again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Doubts", "Sums"]


class SumData(vf.TaskData):
    answer: int
    mood: str = "patient"


class Adding(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.mood == "broken":
            raise ValueError("no idea what is right")
        if self.data.mood == "undecided":  # past the timeout of its scoring
            await asyncio.sleep(60)
        if self.data.mood == "garbled":  # no UTF-8 says this
            raise ValueError("half a pair: \ud800")
        if self.data.mood == "infinite":
            return float("inf")
        last = trace.branches[-1].messages[-1]
        return float(last.role == "assistant" and str(self.data.answer) in (last.content or ""))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Adding(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[Sum]:
        for i in range(8):
            data = SumData(prompt=f"{i}+{i}?", answer=2 * i, system_prompt="Be brief.")
            yield Sum(data, self.config.task)


class DoubtsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class Doubts(vf.Env[DoubtsConfig]):
    """Asks once more when the user is in doubt; other moods break the rules."""

    async def run(self, task: Sum, agents: vf.Agents) -> None:
        mood = task.data.mood
        if mood.startswith("slow"):
            await asyncio.sleep(float(mood.split()[1]))
        if mood == "forgetful":  # the same seat again: its second context is no extension
            await agents.agent.run(task)
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            if mood == "doubtful":
                await interaction.turn("Are you sure?")


if __name__ == "__main__":
    Adding.run()
