"""Generation in a notebook's style, without a server: `python -m scripts.examples.offline`, in the checkout."""

from scripts.llm import LLM, SamplingParams

# `LLM` takes the server's flags as keywords: LLM("meta-llama/Llama-3.1-8B-Instruct", max_model_len=8192)
with LLM(model="demo") as llm:
    chats = [[{"role": "user", "content": f"What is {a} + {a + 1}?"}] for a in (12, 35, 47)]
    for answer in llm.chat(chats, SamplingParams(temperature=0, max_tokens=30)):
        print(answer.outputs[0].text)
    (story,) = llm.generate("Once upon a time", SamplingParams(max_tokens=30, seed=1))
    print(story.prompt + story.outputs[0].text)
