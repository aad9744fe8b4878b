//! Progress lines on standard error, with the seconds since the program started.
//!
//! Plain lines, no cursor movement: they read the same on a terminal, in a CI log and in a file.

use std::sync::OnceLock;
use std::time::Instant;

pub use testkit::skip;

/// The instant that the elapsed seconds count from: the first call.
fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Prints one line of progress.
pub fn say(line: impl AsRef<str>) {
    let elapsed = start().elapsed().as_secs_f32();
    eprintln!("[{elapsed:6.1}s] {}", line.as_ref());
}
