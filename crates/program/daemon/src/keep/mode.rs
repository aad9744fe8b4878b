//! Selection of the keeper.

/// Returns the number of descriptors that systemd keeps for this service, if it is there and keeps
/// any (systemd.exec(5), `$FDSTORE`).
pub fn room_of_systemd() -> Option<usize> {
    let text = std::env::var("FDSTORE").ok()?;
    std::env::var_os("NOTIFY_SOCKET")?;
    text.parse().ok().filter(|most| *most > 0)
}
