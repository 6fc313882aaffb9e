"""The command line called as a function, and how it tells a mistake."""

from gradfilter import cli


def gradfilter(*arguments) -> int:
    """The exit code of a command."""
    try:
        return cli.main([str(a) for a in arguments])
    except SystemExit as end:  # argparse's own way
        return end.code


def mistake(capsys, *arguments) -> str:
    """The one line that a command tells a mistake in, with exit code 2."""
    capsys.readouterr()
    code, err = gradfilter(*arguments), capsys.readouterr().err
    assert code == 2, err
    assert err.count("\n") == 1 and err.startswith(f"gradfilter {arguments[0]}: "), err
    return err
