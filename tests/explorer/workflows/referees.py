"""A workflow that asks an auxiliary model.

Loaded by the processes of workflows, never by the tests.
"""


class Referee:
    """The reward is the number that the model called `name` answers with."""

    def __init__(self, name: str):
        self.name = name

    async def run(self, task, model, auxiliary_models):
        reply = await model.chat(task.messages)
        question = {"role": "user", "content": f"Score {reply.text}"}
        score = await auxiliary_models[self.name].chat([question], temperature=0.0)
        await model.chat([*task.messages, question])
        return float(score.text)
