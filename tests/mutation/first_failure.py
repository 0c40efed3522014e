"""Plugin of pytest: hypothesis stops at the first failing example, and does not shrink it."""

import hypothesis


def pytest_configure(config):
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    parent = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile(
        "first-failure", hypothesis.settings.get_profile(parent), phases=phases
    )
    hypothesis.settings.load_profile("first-failure")
