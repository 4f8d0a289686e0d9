"""The marks of OpenAI's harmony format, in which gpt-oss writes messages of several channels."""

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
