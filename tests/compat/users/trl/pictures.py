"""Pictures in what reset and a tool return."""

from PIL import Image


class Pictures:
    def reset(self, color: str, **row):
        self.color, self.looked = color, 0
        return [
            {"type": "image", "image": Image.new("RGB", (56, 56), color)},
            {"type": "text", "text": "Which color?"},
        ]

    def look(self, size: int) -> list:
        """
        Look at it again.

        Args:
            size: Pixels of each side.
        """
        self.looked += 1
        return [
            {"type": "text", "text": f"{size} pixels:"},
            {"type": "image", "image": Image.new("RGB", (size, size), self.color)},
        ]

    def get_reward(self) -> float:
        return float(self.looked)
