//! Detection of threads that were started before the sandbox was entered, and have not dropped
//! their rights.

use std::fs;
use std::time::Duration;

/// Number of checks, with a pause between them, because a joined thread may be visible for a
/// moment.
const MAX_CHECKS: u32 = 50;
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Returns the names of such threads, except the calling one; empty if /proc is unavailable.
pub(crate) fn outside() -> Vec<String> {
    let mut found = Vec::new();
    for look in 0..MAX_CHECKS {
        if look > 0 {
            std::thread::sleep(CHECK_INTERVAL);
        }
        found = look_once();
        if found.is_empty() {
            break;
        }
    }
    found
}

/// Checks once. A thread that has dropped its rights has `no_new_privs` set, including the calling
/// one.
fn look_once() -> Vec<String> {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    let statuses = tasks.flatten().map(|task| task.path().join("status"));
    let statuses = statuses.filter_map(|status| fs::read_to_string(status).ok());
    statuses
        .filter_map(|status| name_outside(&status))
        .collect()
}

/// Returns the name in a thread's status (proc_pid_status(5)) if the thread has not set
/// `no_new_privs`.
fn name_outside(status: &str) -> Option<String> {
    let field = |name: &str| {
        let mut lines = status.lines();
        lines.find_map(|line| line.strip_prefix(name).map(str::trim))
    };
    match field("NoNewPrivs:") {
        Some("0") => Some(field("Name:").unwrap_or("?").to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn thread_outside_sandbox_is_named() {
        let name = super::name_outside;
        assert_eq!(name("Name:\tlate\nNoNewPrivs:\t0\n"), Some("late".into()));
        assert_eq!(name("Name:\tsignals\nNoNewPrivs:\t1\n"), None);
        // Linux before 4.10 does not report it.
        assert_eq!(name("Name:\told\n"), None);
    }
}
