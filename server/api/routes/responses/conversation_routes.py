"""/v1/conversations: items that are kept under an id, and that requests for responses continue."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import JsonAnswer
from server.api.request.kept_objects import ListQuery
from server.api.routes.endpoints import route
from server.api.routes.responses.items import Item, items_list, items_page, new_items
from server.api.routes.responses.schemas import ConversationChange, InputItem, NewConversation, NewItems
from server.api.routes.responses.store import Kept, ResponseStore
from server.api.routes.responses.translation import check_included, item_messages
from server.api.state import ServerState
from server.http.auth import current_key
from server.http.body import read_query
from server.http.encoding import encode_json
from server.http.request_error import invalid, not_kept

CONVERSATIONS_PATH = "/v1/conversations"
ONE = f"{CONVERSATIONS_PATH}/{{id}}"
PREFIX = "conv_"  # of ids
MAX_ITEMS = 10_000


class Conversations:
    """Answers the routes of conversations, which are kept in the store of the responses."""

    def __init__(self, state: ServerState, store: ResponseStore) -> None:
        self._state = state
        self._store = store
        self._run = store.database.run

    @route(f"POST {CONVERSATIONS_PATH}", NewConversation)
    async def create(self, request: Request, body: NewConversation) -> Response:
        """Begins a conversation."""
        items = await self._translated(body.items or [], 0)
        id = f"{PREFIX}{uuid.uuid4().hex}"
        fields = {"id": id, "object": "conversation", "created_at": int(time.time()), "metadata": body.metadata or {}}
        await self._run(self._store.add, id, current_key.get(), encode_json(fields), items=items)
        return JsonAnswer(fields)

    @route(f"GET {ONE}")
    async def retrieve(self, request: Request) -> Response:
        """A conversation, without its items."""
        return JsonAnswer(msgspec.Raw((await self._find(request)).fields))

    @route(f"POST {ONE}", ConversationChange)
    async def update(self, request: Request, body: ConversationChange) -> Response:
        """Changes the metadata of a conversation."""
        conversation = await self._find(request)
        fields: dict[str, Any] = msgspec.json.decode(conversation.fields)
        fields["metadata"] = body.metadata or {}
        await self._run(self._store.update, conversation.id, encode_json(fields), is_over=True)
        return JsonAnswer(fields)

    @route(f"DELETE {ONE}")
    async def delete(self, request: Request) -> Response:
        """Forgets a conversation.

        The responses of it stay.
        """
        conversation = await self._find(request)
        await self._run(self._store.remove, conversation.id)
        return JsonAnswer({"id": conversation.id, "object": "conversation.deleted", "deleted": True})

    @route(f"GET {ONE}/items")
    async def list_items(self, request: Request) -> Response:
        """The items of a conversation."""
        check_included(request.query_params)
        items = await self._run(self._store.items, (await self._find(request)).id)
        return JsonAnswer(items_page(items, read_query(request.query_params, ListQuery)))

    @route(f"POST {ONE}/items", NewItems)
    async def create_items(self, request: Request, body: NewItems) -> Response:
        """Adds items to a conversation."""
        check_included(request.query_params)
        conversation = await self._find(request)
        earlier = await self._run(self._store.items, conversation.id)
        items = await self._translated(body.items, len(earlier))
        await self._run(self._store.add_items, conversation.id, items)
        return JsonAnswer(items_list(items))

    @route(f"GET {ONE}/items/{{item_id}}")
    async def retrieve_item(self, request: Request) -> Response:
        """An item of a conversation."""
        check_included(request.query_params)
        id = request.path_params["item_id"]
        for item in await self._run(self._store.items, (await self._find(request)).id, id):
            return JsonAnswer(msgspec.Raw(item.fields))
        raise not_kept("Item", id, "item_id")

    @route(f"DELETE {ONE}/items/{{item_id}}")
    async def delete_item(self, request: Request) -> Response:
        """Removes an item from a conversation."""
        conversation, id = await self._find(request), request.path_params["item_id"]
        if not await self._run(self._store.remove_item, conversation.id, id):
            raise not_kept("Item", id, "item_id")
        return JsonAnswer(msgspec.Raw(conversation.fields))

    async def _translated(self, items: list[InputItem], num_earlier: int) -> list[Item]:
        check_room(num_earlier + len(items), "items")
        find = partial(self._store.find_items, owner=current_key.get())
        strict = self._state.settings.strict_fields

        def translated() -> list[Item]:
            return new_items(item_messages(items, "items", find, strict=strict))

        return await self._run(translated)

    async def _find(self, request: Request) -> Kept:
        return await find_conversation(self._store, request.path_params["id"], "conversation_id")


async def find_conversation(store: ResponseStore, id: str, param: str) -> Kept:
    """The conversation with this id. Raises RequestError 404, which names the field `param`, if there is none."""
    conversation = await store.database.run(store.find, id, current_key.get()) if id.startswith(PREFIX) else None
    if conversation is None:
        raise not_kept("Conversation", id, param)
    return conversation


def check_room(num_items: int, param: str) -> None:
    """Raises RequestError 400 if a conversation has no room for so many items in all."""
    if num_items > MAX_ITEMS:
        raise invalid(param, f"a conversation has at most {MAX_ITEMS} items")
