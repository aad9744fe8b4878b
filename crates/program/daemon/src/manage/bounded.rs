//! Work that may hang, because a volume does: on a thread of its own, and waited for a while.

use control::Error;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sync::Unpoisoned;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The caller may give the work up at any time.
    Open,
    /// The work takes effect, so the caller has to wait for it.
    Decided,
    /// The caller has given the work up and does not wait any more.
    GivenUp,
}

/// Decision between a caller that may give up and work that is about to take effect.
#[derive(Clone)]
pub struct Decision(Arc<Mutex<Phase>>);

impl Decision {
    /// From here on the work has an effect. `false`: nobody waits any more, and it may have none.
    pub fn commit(&self) -> bool {
        let mut phase = self.0.lock().unpoisoned();
        if *phase == Phase::Open {
            *phase = Phase::Decided;
        }
        *phase == Phase::Decided
    }

    /// Gives the work up. Returns `false` when the work has already been decided to take effect.
    fn give_up(&self) -> bool {
        let mut phase = self.0.lock().unpoisoned();
        if *phase == Phase::Open {
            *phase = Phase::GivenUp;
        }
        *phase == Phase::GivenUp
    }
}

/// Does work on a thread of its own. Work that has not ended after `limit`, and has not decided
/// anything, is given up and ends without effect. Decided work is waited for as long again.
///
/// # Errors
/// The error of the work, or a timeout that names `what`.
pub fn bounded<T: Send + 'static>(
    what: &str,
    limit: Duration,
    work: impl FnOnce(&Decision) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let decision = Decision(Arc::new(Mutex::new(Phase::Open)));
    let theirs = decision.clone();
    let (told, end) = channel();
    // A span's fields go with the work.
    let span = tracing::Span::current();
    let thread = std::thread::Builder::new().name("manage".into());
    let run = move || {
        let _entered = span.entered();
        let _ = told.send(work(&theirs));
    };
    // Not joined: it may hang.
    thread
        .spawn(run)
        .map_err(|error| Error::failed(format!("{what}: no thread: {error}")))?;
    let bug = || Error::failed(format!("{what}: ended by a bug"));
    match end.recv_timeout(limit) {
        Ok(result) => return result,
        Err(RecvTimeoutError::Disconnected) => return Err(bug()),
        Err(RecvTimeoutError::Timeout) => {}
    }
    let late = |rest: &str| {
        let seconds = limit.as_secs();
        Error::failed(format!(
            "{what}: nothing has answered for {seconds} s; {rest}"
        ))
    };
    if decision.give_up() {
        return Err(late("it is given up"));
    }
    match end.recv_timeout(limit) {
        Ok(result) => result,
        Err(RecvTimeoutError::Disconnected) => Err(bug()),
        Err(RecvTimeoutError::Timeout) => Err(late("it goes on in the background")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::ErrorKind;
    use std::sync::mpsc;

    #[test]
    fn work_past_time_limit_has_no_effect() {
        let (release, held) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let error = bounded("opening", Duration::from_millis(20), move |decision| {
            let _ = held.recv();
            tell.send(decision.commit()).unwrap();
            Ok(())
        });
        let error = error.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Failed);
        assert!(error.message.contains("given up"), "{error}");
        release.send(()).unwrap();
        assert!(!told.recv_timeout(Duration::from_secs(60)).unwrap());
    }

    #[test]
    fn committed_work_is_waited_for() {
        // Far from both ends, for a machine that is busy: it commits within the limit, and ends
        // within twice the limit.
        let done = bounded("x", Duration::from_secs(2), |decision| {
            assert!(decision.commit());
            std::thread::sleep(Duration::from_millis(2100));
            Ok(7)
        });
        assert_eq!(done.unwrap(), 7);
    }

    #[test]
    fn panic_in_work_is_error() {
        let error = bounded("x", Duration::from_secs(60), |_| -> Result<(), Error> {
            panic!("as a bug does")
        });
        assert!(error.unwrap_err().message.contains("bug"));
    }
}
