"""The section `algorithm.teacher`: a served model that tells the log-probs of the student's answers."""

from tandem.config.base import MayChange, PositiveFloat, PositiveInt, Section


class TeacherConfig(Section):
    """A teacher behind vLLM's server or `tandem serve`, in the place of `model.teacher_path`."""

    url: MayChange[str]
    """Up to `/v1`."""
    model: str
    """Its name there."""
    api_key_env: MayChange[str] = "OPENAI_API_KEY"
    """The variable that holds the server's token, if there is one."""
    concurrency: MayChange[PositiveInt] = 32
    """Requests at once, each of one answer."""
    timeout_s: MayChange[PositiveFloat] = 120.0
    """Of each attempt at a request."""
    attempts: MayChange[PositiveInt] = 4
    """At a request, with 1, 2, 4 … s between them; then the run stops."""
