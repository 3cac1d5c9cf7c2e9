"""The agent of the launch benchmark: a Python class, as Agent Lightning's controller starts them."""

import json
import os
import urllib.request


class Sdk:
    """One call through the OpenAI SDK. Agent Lightning's agents post their reward; Leyden's are graded."""

    def run(self) -> None:
        import openai

        environment = os.environ
        base_url = environment.get("AGL_OPENAI_BASE_URL") or environment["OPENAI_BASE_URL"]
        key = environment.get("AGL_KEY") or environment["OPENAI_API_KEY"]
        client = openai.OpenAI(base_url=base_url, api_key=key)
        reply = client.chat.completions.create(model="bench", messages=[{"role": "user", "content": "hi"}])
        print(reply.choices[0].message.content)
        if "AGL_EVENT_URL" in environment:
            body = json.dumps({"event_type": "reward", "data": {"value": 1.0}}).encode()
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            urllib.request.urlopen(urllib.request.Request(environment["AGL_EVENT_URL"], body, headers)).read()


if __name__ == "__main__":
    Sdk().run()
