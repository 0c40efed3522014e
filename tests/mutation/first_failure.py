"""Plugin of pytest: hypothesis stops at the first failing example, and does not shrink it."""

import hypothesis
import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    name = hypothesis.settings.get_current_profile_name()
    profile = hypothesis.settings.get_profile(name)
    hypothesis.settings.register_profile(name, profile, phases=phases)
    hypothesis.settings.load_profile(name)
