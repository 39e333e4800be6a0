class Platform:
    def is_sleep_mode_available(self) -> bool:
        return True
