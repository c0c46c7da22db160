"""The tasks of a step while it is put together, and what each is called."""

from dataclasses import dataclass

from topo_ar.simulation.engine import Task

# The optimizer, and what is no part of the step itself.
NO_BUCKET = -1
OTHER_TRAFFIC = -2


@dataclass(frozen=True, slots=True)
class Name:
    """What a task is called: for traces the lane and the classes of its ranks; its bucket."""

    text: str
    lane: str
    ranks: tuple[int, ...]
    bucket: int


class TaskList:
    """The tasks so far, and their names."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.names: list[Name] = []

    def __len__(self) -> int:
        return len(self.tasks)

    def add(self, task: Task, text: str, lane: str, ranks: tuple[int, ...], bucket: int) -> int:
        """Append a task and return its position."""
        self.tasks.append(task)
        self.names.append(Name(text, lane, ranks, bucket))
        return len(self.tasks) - 1
