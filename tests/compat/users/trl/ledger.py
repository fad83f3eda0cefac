"""Asynchronous tools and an asynchronous reward; reset returns nothing."""

import asyncio


class Ledger:
    def reset(self, **row):
        self.entries = []
        self.goal = row["goal"]

    async def pay(self, amount: float) -> str:
        """
        Pay an amount.

        Args:
            amount: What to pay.
        """
        await asyncio.sleep(0)
        self.entries.append(amount)
        return f"paid {amount}"

    def total(self) -> float:
        """
        Sum the entries.
        """
        return sum(self.entries)

    async def get_reward(self):
        await asyncio.sleep(0)
        return None if self.goal is None else float(sum(self.entries) == self.goal)
