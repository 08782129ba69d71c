"""How long Hypothesis searches in the unit tests: briefly, or ten times as long with HYPOTHESIS_PROFILE=ci."""

import os

from hypothesis import settings

EXAMPLES = 25

# No deadline: how long one example takes says more about the machine than about the code.
# A failure prints its example, and the blob that repeats it on any machine.
settings.register_profile(
    "quick",
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    derandomize=False,
    print_blob=True,
)
settings.register_profile("ci", settings.get_profile("quick"), max_examples=10 * EXAMPLES)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
