from __future__ import annotations

from typing import Any


class RLOfflineMixin:
    def init_weight_transfer_engine(self, request: Any) -> None:
        self.collective_rpc('init_weight_transfer_engine', kwargs={'init_info': request['init_info']})

    def start_weight_update(self) -> None:
        self.collective_rpc('start_weight_update')

    def update_weights(self, request: Any) -> None:
        self.collective_rpc('update_weights', kwargs={'update_info': request['update_info']})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.collective_rpc('finish_weight_update')
