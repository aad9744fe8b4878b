//! Crash points of a build with the feature `points`.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Panic payload of a crash point in a test's own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crashed(
    /// Name of the point.
    pub &'static str,
);

/// Points that a test selected for its thread.
#[derive(Default)]
struct Plan {
    /// Points at which to die, one after the other, each with the number of the pass.
    targets: VecDeque<(&'static str, u64)>,
    /// Number of passes of each point since the plan was made.
    passed: BTreeMap<&'static str, u64>,
}

thread_local! {
    static PLAN: RefCell<Plan> = RefCell::default();
}

/// Point that the environment selects, and the number of remaining passes.
static PROCESS: OnceLock<Option<(String, AtomicU64)>> = OnceLock::new();

fn of_environment() -> Option<(String, AtomicU64)> {
    let value = std::env::var(crate::VARIABLE).ok()?;
    let line = if value.starts_with('/') {
        taken_from(Path::new(&value))?
    } else {
        value
    };
    let (name, count) = line.trim().rsplit_once(':')?;
    Some((name.to_owned(), AtomicU64::new(count.parse().ok()?)))
}

/// Removes the first line from a file and returns it.
fn taken_from(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let (first, rest) = text.split_once('\n')?;
    let new = path.with_extension("new");
    fs::write(&new, rest).ok()?;
    fs::rename(new, path).ok()?;
    Some(first.to_owned())
}

/// Starts counting passes of the point that [`VARIABLE`](crate::VARIABLE) selects. Called when the
/// process begins.
pub fn begin() {
    let _ = PROCESS.set(of_environment());
}

/// Makes this thread die once, at the `count`th pass of a point from now on (counted from 1).
/// Resets all counts.
pub fn arm(name: &'static str, count: u64) {
    PLAN.with_borrow_mut(|plan| {
        *plan = Plan {
            targets: [(name, count)].into(),
            ..Plan::default()
        };
    });
}

/// Adds a second point: after dying at the previous one, this thread dies at the `count`th pass of
/// `name`, counted from then on.
pub fn then(name: &'static str, count: u64) {
    PLAN.with_borrow_mut(|plan| plan.targets.push_back((name, count)));
}

/// Makes this thread pass all points, and resets all counts.
pub fn disarm() {
    PLAN.with_borrow_mut(|plan| *plan = Plan::default());
}

/// Returns the points that this thread has passed since the last [`arm`] or [`disarm`], with the
/// number of passes.
pub fn passed() -> BTreeMap<&'static str, u64> {
    PLAN.with_borrow(|plan| plan.passed.clone())
}

/// Handles a pass of a point; called by [`point!`](crate::point).
pub fn reached(name: &'static str) {
    if let Some(Some((target, left))) = PROCESS.get()
        && target == name
        && left.fetch_sub(1, Ordering::Relaxed) == 1
    {
        let said = format!("{}{name}\n", crate::SAID);
        let _ = rustix::io::write(rustix::stdio::stderr(), said.as_bytes());
        let this = rustix::process::getpid();
        let _ = rustix::process::kill_process(this, rustix::process::Signal::KILL);
        // A sandboxed process may not send itself a signal, and aborts instead.
        std::process::abort();
    }
    let dies = PLAN.with_borrow_mut(|plan| {
        let passed = plan.passed.entry(name).or_default();
        *passed += 1;
        let dies = matches!(plan.targets.front(), Some((at, n)) if *at == name && *passed >= *n);
        if dies {
            plan.targets.pop_front();
        }
        dies
    });
    if dies {
        // No panic message, because the test has asked for this panic.
        resume_unwind(Box::new(Crashed(name)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::catch_unwind;

    #[test]
    fn armed_thread_dies_at_requested_pass() {
        arm("crash.test", 3);
        let died = catch_unwind(|| {
            for _ in 0..2 {
                crate::point!("crash.test");
                crate::point!("crash.other");
            }
            assert_eq!(passed(), [("crash.other", 2), ("crash.test", 2)].into());
            crate::point!("crash.test");
        });
        let died = died.unwrap_err();
        assert_eq!(died.downcast_ref(), Some(&Crashed("crash.test")));
        // A point fires only once.
        crate::point!("crash.test");
        disarm();
        assert!(passed().is_empty());
        crate::point!("crash.test");
    }

    #[test]
    fn armed_thread_dies_at_consecutive_points() {
        arm("crash.test", 1);
        then("crash.other", 2);
        crate::point!("crash.other");
        assert!(catch_unwind(|| crate::point!("crash.test")).is_err());
        assert!(catch_unwind(|| crate::point!("crash.other")).is_err());
        crate::point!("crash.other");
        disarm();
    }

    #[test]
    fn armed_point_affects_own_thread_only() {
        arm("crash.test", 1);
        let other = std::thread::spawn(|| crate::point!("crash.test"));
        other.join().unwrap();
        disarm();
    }
}
