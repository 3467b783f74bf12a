"""The one exception a user sees: a mistake of theirs, in one line, with the way out."""


class QerlError(Exception):
    """A user's mistake: the message names the key, the value found and the fix, in one line.

    The command line prints the message alone and exits with status 2; `python` users catch it.
    Broken invariants of our own are assertions instead, so that they are never mistaken for this.
    """
