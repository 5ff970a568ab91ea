"""A small OpenAI-compatible server on 127.0.0.1, which answers as a function tells it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    """`answer` gets the question and how often it was asked before, and returns a status and a text."""

    def __init__(self, answer: Callable[[str, int], tuple[int, str]]) -> None:
        self.answer = answer
        self.questions: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.url = ""

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "messages" not in body:  # of the endpoint of embeddings
            texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
            answers = [self.answer(text, 0) for text in texts]
            vectors = [json.loads(text) if text.startswith("[") else [0.6, 0.8] for _, text in answers]
            data = [{"index": number, "embedding": vector} for number, vector in enumerate(vectors)]
            # in any order, as the index allows
            return max(status for status, _ in answers), {
                "data": data[::-1],
                "usage": {"total_tokens": len(texts)},
            }
        question = body["messages"][-1]["content"]
        with self.lock:
            asked_before = self.questions.count(question)
            self.questions.append(question)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            status, text = self.answer(question, asked_before)
        finally:
            with self.lock:
                self.in_flight -= 1
        message = {"role": "assistant", "content": text}
        return status, {"choices": [{"message": message}], "usage": {"total_tokens": 7}}


@contextmanager
def chat_server(answer: Callable[[str, int], tuple[int, str]]) -> Iterator[ChatServer]:
    """The server, while it runs."""
    server = ChatServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = server.reply(body)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("retry-after-ms", "10")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        server.url = f"http://127.0.0.1:{http.server_port}/v1"
        try:
            yield server
        finally:
            http.shutdown()
