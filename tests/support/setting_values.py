"""Values of declared settings, for tests over all declarations."""


def other_value(setting):
    """A value of the setting that is not its default."""
    default, values = setting.default, setting.values
    if isinstance(default, bool):
        return not default
    if isinstance(values, tuple):
        return next(value for value in values if value != default)
    if setting.listed and "," in default:
        return default.partition(",")[0]
    if isinstance(default, str):
        return "another"
    for candidate in (default + 1, default / 2, 1, 0.5, 0.25):
        value = type(default)(candidate)
        try:
            if value != default:
                return setting.checked("", value)
        except ValueError:
            continue
    raise AssertionError(f"no other value of {setting}")
