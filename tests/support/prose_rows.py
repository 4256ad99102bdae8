"""Sentences of the style that tools/prose.py finds, each with a plain version that it accepts."""

ROWS = [
    (
        "All replicas of a run, as one loop sees them: a step is done by all of them, or it is done again.",
        "The replicas of a run as one object: every replica commits a step, or all of them retry it.",
    ),
    (
        "The agreement may reach some and not others, when somebody dies in its midst: then those who missed it hear of it in the next generation",
        "If a rank dies during the vote, some ranks may miss the result. They learn it when the next generation forms, and commit then.",
    ),
    (
        "others are at work, and this worker has not got the state from them yet: it has no group",
        "True until this worker has received the training state; it has no process group yet",
    ),
    (
        "the workers of this start do not stand at the same place",
        "workers resumed from different steps: rank 0 at 120, rank 1 at 100",
    ),
    (
        "See to it that nobody goes on from what the members of this generation hold, also who has not found out: all begin anew.",
        "Mark this generation's state as untrusted: every member restarts from a checkpoint, including members that have not noticed yet.",
    ),
    (
        "Nobody leaves before all have done all; then the leader writes down that the run has ended, and they go.",
        "Barrier; then rank 0 records the end of the run and all ranks exit.",
    ),
    (
        "Waiting for what travels between workers, and giving it up when the generation has come to its end.",
        "Wait for in-flight sends and receives; abandon them when the generation ends.",
    ),
    ("A group that is for life is never broken.", "Static process group: never invalidated."),
    (
        "Deciding together: whatever changes the course of a run is decided on values that every process has.",
        "Consensus: control flow depends only on values that all ranks agree on.",
    ),
    (
        "Nothing rests on a message that comes exactly once; who was silent and is heard of again is there again",
        "Lost or repeated messages are harmless: each heartbeat re-sends the sender's state, and a member heard from again counts as alive.",
    ),
    (
        "{first} ended with exit code 9, without a word",
        "worker 1 exited with code 9 and left no error report",
    ),
    (
        "broke off with exit code 0 while the others were at work",
        "exited early (code 0) while other workers were still training",
    ),
    (
        "the environment names a worker by halves: no RANK",
        "incomplete launch environment: RANK is not set",
    ),
    ("--hosts beside --stop", "--stop cannot be combined with --hosts"),
    (
        "a step that several processes share is not compiled",
        "--compile is not supported with --tensor > 1",
    ),
    (
        "folder whose weights, shape and tokenizer it begins with: Hugging Face's or a run's; empty: a new one",
        "initialize from this Hugging Face or run folder; empty: train from scratch",
    ),
    (
        "without a step forward, and nobody only slow, until the verdict on a hang",
        "time without progress before the blocking rank is identified",
    ),
    (
        "Nothing moves: who holds the others up, where, since when, and what is done about it.",
        "Hang detection: which rank blocks the others, where, for how long, and what to do.",
    ),
    (
        "Lack of memory inside becomes an OutOfMemoryError, which says which layout would fit.",
        "Turn out-of-memory errors into an OutOfMemoryError that names a layout that fits.",
    ),
    (
        "Signals, read like mail: while entered, those that stop a run and SIGCHLD do nothing but lie here until `wait` is asked.",
        "Context manager that queues stop signals and SIGCHLD; `wait` returns them.",
    ),
    (
        "Who is not in it ends, and is started anew by its agent.",
        "Workers left out of it exit; their agent restarts them.",
    ),
    (
        "A port that refuses means that the process has ended.",
        "A refused connection is taken as proof that the process exited.",
    ),
    (
        "left out: 339 said before; 775 the same source with another target",
        "dropped: 339 duplicates, 775 conflicting translations",
    ),
    (
        "A stopped or killed run goes on where it was",
        "A stopped or killed run resumes where it left off",
    ),
]
