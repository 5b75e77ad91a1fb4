"""Where a Gymnasium environment comes from: the registry, or a user's own code; and what is wrapped around it.

`phalanx/envs/gymnasium.py` makes its environments here. Name and arguments may come from the `config.json` of somebody
else's run, so that not everything that can be called is.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from phalanx.config import GymnasiumConfig
from phalanx.errors import LIBRARIES, UserError, in_words, require
from phalanx.given import Given, is_code, is_lost, module_at, resolve
from phalanx.runtime.signals import LEAVING, may_be_ctrl_c


def make_env(config: GymnasiumConfig, registered: Callable[..., Any]) -> Any:
    """The environment that a configuration describes; `registered` makes those that have a name in Gymnasium."""
    arguments = json.loads(config.kwargs or "{}")
    make = own_maker(config.id, bool(arguments))
    if make is None:
        name = config.id.rpartition(":")[2]  # its module is imported, which registers it
        env = registered(name, **arguments)
    elif hasattr(make, "entry_point"):  # what a script has registered
        env = registered(make, **arguments)
    else:
        env = calling(f"env.id {config.id}", make, **drawing(make, arguments))
    if config.wrap:
        env = calling(f"env.wrap {config.wrap}", checked(resolve(config.wrap, "env.wrap"), config.wrap), env)
    words = f"env.{'wrap' if config.wrap else 'id'} {config.wrap or config.id}"
    require(
        not hasattr(env, "single_action_space"),
        f"{words} gave {type(env).__name__}, a vector environment; make a single one, and say by sampler.environments "
        "how many there are to be",
    )
    able = all(hasattr(env, name) for name in ("reset", "step", "action_space", "observation_space"))
    require(able, f"{words} gave {type(env).__name__}, which is not a Gymnasium environment")
    return env


def drawing(make: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which a class makes an environment that can be drawn, as Gymnasium does for its ids."""
    modes = (getattr(make, "metadata", None) or {}).get("render_modes") or ()
    if not isinstance(make, type) or "rgb_array" not in modes:
        return arguments
    takes = "render_mode" in inspect.signature(make).parameters
    return {"render_mode": "rgb_array", **arguments} if takes else arguments


def own_maker(text: str, has_arguments: bool) -> Callable[..., Any] | None:
    """The user's code that makes environments; None for names that Gymnasium knows, by itself or once the module that
    stands before it was imported."""
    if isinstance(text, Given) or is_lost(text):
        return resolve(text, "env.id")
    if not is_code(text):
        return None
    place, _, name = text.rpartition(":")
    module_at(place, "env.id")
    import gymnasium

    return None if name in gymnasium.registry else checked(resolve(text, "env.id"), text, has_arguments)


def checked(made_by: Any, text: str, has_arguments: bool = False) -> Callable[..., Any]:
    """Refuse to call what is neither a class of environments, or of wrappers, nor a plain function; and with arguments
    a function of a library, which may do anything."""
    import gymnasium

    file = getattr(sys.modules.get(getattr(made_by, "__module__", None) or ""), "__file__", None) or ""
    is_function = inspect.isfunction(made_by)
    good = is_function or (isinstance(made_by, type) and issubclass(made_by, gymnasium.Env))
    require(good, f"{text} is neither a class of Gymnasium environments nor a plain function that makes one")
    require(
        not (is_function and has_arguments and file.startswith(LIBRARIES)),
        f"{text} is a function of an installed package, which env.kwargs are not handed to; name its class of "
        "environments, or a function of your own",
    )
    return made_by


def calling(what: str, function: Callable[..., Any], *parts: Any, **arguments: Any) -> Any:
    """What a user's function returns; what it raises is said with its name."""
    try:
        return function(*parts, **arguments)
    except UserError:
        raise
    except (Exception, *LEAVING) as error:
        if may_be_ctrl_c(error):
            raise
        raise UserError(f"{what} cannot make the environment: {in_words(error)}") from error
