"""Loops that keep state in many places, for test_state_places.py and `lockstep drill`.

Each changes something in every step that decides the loss of later steps. `exact` ones have it in
the checkpoint; each of the others must be named, or refused, before the first checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent

LOOP = '''
"""A loop with state: {name}."""

import collections
import copy
import functools
import itertools
import logging
import os
import queue
import random
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

INPUTS = torch.rand(48, 4, generator=torch.Generator().manual_seed(1))
{module}

def train(out: str = "runs/state", steps: int = 8, save_every: int = 3) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    dataset = TensorDataset(INPUTS)
{before}
    optimizer = {optimizer}
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"{{os.environ.get('RANK', 'agent')}}.log")
    logging.getLogger("lockstep").addHandler(handler)
    logging.getLogger("lockstep").setLevel(logging.INFO)
    with lockstep.Session(out, micro_batches=4, save_every=save_every) as session:
        model, optimizer = session.prepare(net, optimizer)
        loader = session.loader(dataset, batch_size=12)
{setup}
        for step in session.steps(steps):
{top}
            for (x,) in loader(step):
                session.backward({factor} * model(x).square().mean())
            optimizer.step()
{after}
'''


@dataclass(frozen=True)
class Place:
    """Parts of the loop; `factor` is the expression that decides the loss.

    word   what the warning or the refusal contains; "": the place is exact
    """

    word: str
    factor: str = "1.0"
    module: str = ""
    before: str = ""
    setup: str = ""
    top: str = ""
    after: str = ""
    optimizer: str = "torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)"


DECAYING = """
class Decaying(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group['lr'] = 0.1 / self.steps
        return super().step(closure)
"""
OWN_STATE_DICT = """
    def state_dict(self):
        return super().state_dict() | {'steps': self.steps}

    def load_state_dict(self, state):
        self.steps = state.pop('steps')
        super().load_state_dict(state)
"""

PLACES: dict[str, Place] = {
    # Local variables.
    "a local number": Place("factor", "factor", setup="factor = 1.0", after="factor *= 0.9"),
    "a local counter": Place("count", "1 / (1 + count)", setup="count = 0", after="count += 1"),
    "two local variables that change places": Place(
        "first", "first", setup="first, second = 1.0, 0.5", after="first, second = second, first"
    ),
    "a local list": Place(
        "seen", "1 / (1 + len(seen))", setup="seen = []", after="seen.append(step)"
    ),
    "a local deque": Place(
        "recent",
        "1 / (1 + sum(recent))",
        setup="recent = collections.deque(maxlen=3)",
        after="recent.append(step)",
    ),
    "a local dict": Place(
        "table", "table['factor']", setup="table = {'factor': 1.0}", after="table['factor'] *= 0.9"
    ),
    "a local set": Place(
        "seen", "1 / (1 + len(seen))", setup="seen = set()", after="seen.add(step)"
    ),
    "a local tensor that is assigned": Place(
        "scale", "scale", setup="scale = torch.ones(())", after="scale = scale * 0.9"
    ),
    "a local tensor that changes in place": Place(
        "scale", "scale", setup="scale = torch.ones(())", after="scale.mul_(0.9)"
    ),
    "a local array": Place(
        "scale", "float(scale[0])", setup="scale = np.ones(1)", after="scale *= 0.9"
    ),
    "a best score with patience": Place(
        "best",
        setup="best, bad = float('inf'), 0",
        after="""
            bad = 0 if session.loss < best else bad + 1
            best = min(best, session.loss)
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * 0.5**bad
        """,
    ),
    "a last loss": Place("last", "1 + last", setup="last = 0.0", after="last = session.loss"),
    "a hidden state by micro-batch": Place(
        "hidden",
        "1.0",
        setup="hidden = 1.0",
        top="factor = hidden",
        after="""
            hidden = 0.5 * hidden + session.loss
            for group in optimizer.param_groups:
                group['lr'] = 0.1 * hidden
        """,
    ),
    # Closures and functions.
    "a nonlocal variable": Place(
        "factor",
        "advance.value()",
        before="""
            factor = 1.0

            def value():
                return factor

            def advance():
                nonlocal factor
                factor *= 0.9

            advance.value = value
        """,
        after="advance()",
    ),
    "a list in a closure": Place(
        "cell",
        "value()",
        before="""
            cell = [1.0]

            def value():
                return cell[0]

            def advance():
                cell[0] *= 0.9
        """,
        after="advance()",
    ),
    "an attribute of a function": Place(
        "advance",
        "advance.factor",
        module="""
            def advance():
                advance.factor *= 0.9


            advance.factor = 1.0
        """,
        after="advance()",
    ),
    "a default argument": Place(
        "cell|advance|value",
        "value()",
        module="""
            CELL = [1.0]


            def value(cell=CELL):
                return cell[0]


            def advance(cell=CELL):
                cell[0] *= 0.9
        """,
        after="advance()",
    ),
    "a cached result": Place(
        "NOW|measured",
        "measured()",
        module="""
            NOW = [0]


            @functools.lru_cache(None)
            def measured():
                return 1 / (1 + NOW[0])
        """,
        top="NOW[0] = step",
    ),
    # Globals, classes and objects.
    "a global variable": Place(
        "FACTOR",
        "FACTOR",
        module="""
            FACTOR = 1.0


            def advance():
                global FACTOR
                FACTOR *= 0.9
        """,
        after="advance()",
    ),
    "a variable of an imported module": Place(
        "factor|state_helper",
        "state_helper.factor",
        module="""
            import state_helper
        """,
        after="state_helper.advance()",
    ),
    "an attribute of a class": Place(
        "factor|Meter",
        "Meter.factor",
        module="""
            class Meter:
                factor = 1.0
        """,
        after="Meter.factor *= 0.9",
    ),
    "an attribute of an object": Place(
        "meter",
        "meter.factor",
        module="""
            class Meter:
                def __init__(self):
                    self.factor = 1.0

                def advance(self):
                    self.factor *= 0.9
        """,
        setup="meter = Meter()",
        after="meter.advance()",
    ),
    "an object with slots": Place(
        "meter",
        "meter.factor",
        module="""
            class Meter:
                __slots__ = ('factor',)

                def advance(self):
                    self.factor *= 0.9
        """,
        setup="""
            meter = Meter()
            meter.factor = 1.0
        """,
        after="meter.advance()",
    ),
    "a dataclass": Place(
        "meter",
        "meter.factor",
        module="""
            @dataclass
            class Meter:
                factor: float = 1.0
        """,
        setup="meter = Meter()",
        after="meter.factor *= 0.9",
    ),
    "a namespace of options": Place(
        "args",
        "args.factor",
        setup="args = types.SimpleNamespace(factor=1.0)",
        after="args.factor *= 0.9",
    ),
    "an environment that acts": Place(
        "env",
        "observation",
        module="""
            class Env:
                def __init__(self):
                    self.position = 1.0

                def step(self, action):
                    self.position = 0.5 + 0.5 * self.position * action
                    return self.position
        """,
        setup="env = Env()",
        top="observation = env.step(0.9)",
    ),
    "an attribute of the data set": Place(
        "dataset|noise",
        module="""
            class Noisy(torch.utils.data.Dataset):
                noise = 1.0

                def __len__(self):
                    return len(INPUTS)

                def __getitem__(self, i):
                    return (INPUTS[i] * self.noise,)
        """,
        before="dataset = Noisy()",
        after="dataset.noise *= 0.9",
    ),
    # Iterators and generators of random numbers.
    "an iterator": Place(
        "factors",
        "factor",
        setup="factors = iter([1 / (1 + i) for i in range(100)])",
        top="factor = next(factors)",
    ),
    "a generator": Place(
        "factors",
        "factor",
        module="""
            def halves():
                value = 1.0
                while True:
                    yield value
                    value *= 0.9
        """,
        setup="factors = halves()",
        top="factor = next(factors)",
    ),
    "itertools.count": Place(
        "numbers",
        "1 / (1 + number)",
        setup="numbers = itertools.count()",
        top="number = next(numbers)",
    ),
    "itertools.cycle": Place(
        "factors",
        "factor",
        setup="factors = itertools.cycle([1.0, 0.5, 0.25])",
        top="factor = next(factors)",
    ),
    "random.Random": Place(
        "generator",
        "factor",
        setup="generator = random.Random(1)",
        top="factor = generator.random()",
    ),
    "a generator of NumPy": Place(
        "generator",
        "factor",
        setup="generator = np.random.default_rng(1)",
        top="factor = float(generator.random())",
    ),
    "a generator of torch": Place(
        "generator",
        "factor",
        setup="generator = torch.Generator().manual_seed(1)",
        top="factor = float(torch.rand((), generator=generator))",
    ),
    "a queue": Place(
        "waiting",
        "factor",
        setup="""
            waiting = queue.Queue()
            waiting.put(1.0)
        """,
        top="""
            factor = waiting.get()
            waiting.put(factor * 0.9)
        """,
    ),
    # The process and the disk.
    "the position in a file": Place(
        "lines",
        "float(line)",
        setup="""
            path = folder / f'lines-{os.getpid()}'
            path.write_text(''.join(f'{1 / (1 + i)}\\n' for i in range(100)))
            lines = open(path)
        """,
        top="line = lines.readline()",
    ),
    "a file that the loop writes and reads": Place(
        "file",
        "factor",
        setup="""
            path = folder / f'factor-{os.getpid()}'
            path.write_text('1.0')
        """,
        top="factor = float(path.read_text())",
        after="path.write_text(str(factor * 0.9))",
    ),
    "os.environ": Place(
        "environ",
        "factor",
        top="factor = float(os.environ.get('STATE_FACTOR', '1.0'))",
        after="os.environ['STATE_FACTOR'] = str(factor * 0.9)",
    ),
    # The model and the optimizer.
    "a number of a module": Place(
        "", "model.module.factor", before="net.factor = 1.0", after="net.factor *= 0.9"
    ),
    "a tensor of a module": Place(
        "", "net.scale", before="net.scale = torch.ones(())", after="net.scale.mul_(0.9)"
    ),
    "a buffer that is not persistent": Place(
        "",
        "net.scale",
        before="net.register_buffer('scale', torch.ones(()), persistent=False)",
        after="net.scale.mul_(0.9)",
    ),
    "a persistent buffer": Place(
        "",
        "net.scale",
        before="net.register_buffer('scale', torch.ones(()))",
        after="net.scale.mul_(0.9)",
    ),
    "the rate of a dropout": Place(
        "",
        "model.module.drop.p",
        before="""
            net.drop = nn.Dropout(0.5)
            net.drop.eval()
        """,
        after="net.drop.p *= 0.9",
    ),
    "a frozen copy of the model": Place(
        "teacher",
        "(1 + teacher(x).mean().detach())",
        setup="teacher = copy.deepcopy(net)",
        after="""
            with torch.no_grad():
                for p, q in zip(teacher.parameters(), net.parameters()):
                    p.lerp_(q, 0.1)
        """,
    ),
    "an optimizer with a counter": Place(
        "", module=DECAYING, optimizer="Decaying(net.parameters(), lr=0.1)"
    ),
    "an optimizer that overrides state_dict": Place(
        "", module=DECAYING + OWN_STATE_DICT, optimizer="Decaying(net.parameters(), lr=0.1)"
    ),
    "a user's scheduler that is not saved": Place(
        "schedule",
        module="""
            class Schedule:
                def __init__(self, optimizer):
                    self.optimizer, self.count = optimizer, 0

                def step(self):
                    self.count += 1
                    for group in self.optimizer.param_groups:
                        group['lr'] = 0.1 / self.count
        """,
        setup="schedule = Schedule(optimizer)",
        after="schedule.step()",
    ),
    "a scheduler that is not saved": Place(
        "StepLR",
        setup="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
        after="scheduler.step()",
    ),
    # What checkpoints hold.
    "a scheduler": Place(
        "",
        setup="""
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            session.state(scheduler=scheduler)
        """,
        after="scheduler.step()",
    ),
    "a learning rate of a group": Place(
        "",
        after="""
            for group in optimizer.param_groups:
                group['lr'] *= 0.9
        """,
    ),
    "plain values of session.state": Place(
        "",
        "saved.factor",
        setup="saved = session.state(factor=1.0, seen=[])",
        after="""
            saved.factor *= 0.9
            saved.seen.append(step)
        """,
    ),
    "an average in session.state": Place(
        "",
        "(1 + average(x).mean().detach())",
        setup="""
            average = torch.optim.swa_utils.AveragedModel(net)
            session.state(average=average)
        """,
        after="average.update_parameters(net)",
    ),
    "a value of each micro-batch": Place(
        "",
        "carry(saved.offset, x.mean())",
        module="""
            def carry(offset, value):
                before = float(offset.value)
                offset.value = 0.5 * offset.value + value.detach()
                return 1 + before
        """,
        setup="saved = session.state(offset=session.per_micro_batch(torch.zeros(())))",
    ),
    "draws from the global generators": Place(
        "",
        "factor",
        top="factor = float(torch.rand(())) + random.random() + np.random.rand()",
        after="net[0].weight.data.mul_(0.9 + 0.1 * random.random())",
    ),
}


def write(name: str, folder: Path) -> Path:
    """Write the script of a place, and a module that it may import; return the script."""
    place = PLACES[name]

    def part(text: str, spaces: int) -> str:
        return indent(dedent(text).strip("\n"), " " * spaces)

    parts = {
        "before": part(place.before, 4),
        "setup": part(place.setup, 8),
        "top": part(place.top, 12),
        "after": part(place.after, 12),
    }
    text = LOOP.format(
        name=name,
        module=part(place.module, 0),
        factor=place.factor,
        optimizer=place.optimizer,
        **parts,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state_helper.py").write_text(
        "factor = 1.0\n\n\ndef advance():\n    global factor\n    factor *= 0.9\n"
    )
    script = folder / "loop.py"
    script.write_text(text.lstrip("\n"))
    return script
