//! Disks that are unavailable: a volume, or a file beside it, cannot be opened. All other disks are
//! served meanwhile. Each is retried as long as the process runs, with growing pauses, by the calls
//! that serve a disk at the start. A retry continues from the state that an earlier process has
//! left of the disk, including its client.

use super::Manager;
use super::table::DiskFailure;
use crate::confine::path_check;
use crate::keep::Attempt;
use crate::serve::Serving;
use config::disk::DiskSpec;
use control::Error;
use control::api::EventKind;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Pause before the second attempt to serve an unavailable disk; each later pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Remedy in the error about a volume that the sandbox keeps this process from opening.
const SANDBOX: &str = "; the sandbox may keep this process from it: vnvme upgrade has another one \
                       take its place, which opens the disk";

/// Interval of checks whether a disk whose files do not answer has been removed.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The files of a disk could not be asked, and are asked again later.
struct AskedAgain;

impl Manager {
    /// Retries the unavailable disks for as long as they are unavailable. Each disk has a thread of
    /// its own, because opening a file may hang.
    pub(crate) fn retry_unavailable(self: &Arc<Self>, _: &Serving) {
        let all = self.worker_context.table.all().into_iter();
        let mut any = !self.worker_context.options.unavailable.disks.is_empty();
        for (name, _) in all.filter(|(_, entry)| entry.failed.is_some()) {
            self.retry_in_background(&name);
            any = true;
        }
        // The next process knows which disks were not served.
        if any {
            self.keep_state();
        }
    }

    /// Tries again to serve one disk, for as long as it is unavailable.
    pub(super) fn retry_in_background(self: &Arc<Self>, name: &str) {
        let (manager, disk) = (self.clone(), name.to_owned());
        let builder = std::thread::Builder::new().name("retry".into());
        // The thread lives as long as the process, or until the disk is served.
        if let Err(error) = builder.spawn(move || manager.retry(&disk)) {
            tracing::error!(disk = name, %error, "the disk is not tried again");
        }
    }

    fn retry(self: &Arc<Self>, name: &str) {
        while self.wait_started().is_err() {}
        let kills = self.keeper().pause_after_deaths(name);
        let mut pause = kills.unwrap_or(FIRST_PAUSE);
        loop {
            self.worker_context.table.wait_changed(pause);
            let Some((spec, failed)) = self.worker_context.table.unavailable(name) else {
                return;
            };
            pause = MAX_PAUSE.min(pause * 2);
            let failed = match self.wait_files(&spec, failed, pause) {
                Ok(Some(failed)) => failed,
                Ok(None) => return,
                Err(AskedAgain) => continue,
            };
            // Should the process die, the next one knows at which disk.
            let alone = kills.map(|_| self.alone.lock().unpoisoned());
            let attempt = Attempt::new(self.keeper(), name);
            let served = self.serve_again(name, &failed, attempt);
            drop(alone);
            let Err(error) = served else {
                return;
            };
            self.fails_again(name, &failed, (error.message, None), pause);
        }
    }

    /// Waits until the files of an unavailable disk answer; returns why it is unavailable by now.
    /// `None`: it is served, or another disk has its name.
    ///
    /// # Errors
    /// The files cannot be asked.
    fn wait_files(
        &self,
        disk: &DiskSpec,
        mut failed: Arc<DiskFailure>,
        pause: Duration,
    ) -> Result<Option<Arc<DiskFailure>>, AskedAgain> {
        let name = &disk.name();
        let mut check = match self.worker_context.path_checker.start(disk) {
            Ok(Some(check)) => check,
            Ok(None) => return Ok(Some(failed)),
            Err(why) => {
                self.fails_again(name, &failed, (why, None), pause);
                return Err(AskedAgain);
            }
        };
        while !check.wait(CHECK_INTERVAL) {
            let began = check.began();
            if failed.since.is_none() && began.elapsed() >= path_check::LIMIT {
                let why = path_check::opening_for(began.elapsed());
                self.fails_again(name, &failed, (why, Some(began)), pause);
            }
            match self.worker_context.table.unavailable(name) {
                Some((_, now)) if Arc::ptr_eq(&now._counted, &failed._counted) => failed = now,
                _ => return Ok(None),
            }
        }
        Ok(Some(failed))
    }

    /// Serves a disk that was unavailable, if its volumes can be opened by now.
    fn serve_again(
        self: &Arc<Self>,
        name: &str,
        failed: &Arc<DiskFailure>,
        attempt: Attempt,
    ) -> Result<(), Error> {
        let Some((spec, _)) = self.worker_context.table.unavailable(name) else {
            return Ok(());
        };
        let manager = self.clone();
        let opening = std::thread::Builder::new().name("open".into());
        let opening = opening.spawn(move || manager.open(&spec));
        let opening = opening.map_err(|error| Error::failed(format!("no thread: {error}")))?;
        let bug = |_| Err(Error::failed("opening has ended by a bug"));
        let ready = opening.join().unwrap_or_else(bug)?;
        let again = self.worker_context.table.take_unavailable(name, failed)?;
        let running = self.serve(ready)?;
        // Before anybody can see that the disk is served: whatever ends the process then is another
        // cause.
        drop(attempt);
        let name = again.serve(running);
        self.tell(EventKind::Added, &name, None);
        tracing::info!(disk = name, "the disk was unavailable, and is served again");
        Ok(())
    }

    fn fails_again(
        &self,
        name: &str,
        before: &Arc<DiskFailure>,
        (mut why, since): (String, Option<Instant>),
        pause: Duration,
    ) {
        let is_refused = ["ermission denied", "not permitted"].iter();
        if self.allow.is_confined() && is_refused.into_iter().any(|words| why.contains(words)) {
            why += SANDBOX;
        }
        let message = match since {
            Some(_) => format!("unavailable: {why}"),
            None => format!("unavailable: {why}; tried again in {} s", pause.as_secs()),
        };
        let failed = DiskFailure {
            why: why.clone(),
            since,
            was_opened: before.was_opened,
            _counted: before._counted.clone(),
        };
        if self.worker_context.table.fails_again(name, before, failed) {
            tracing::error!(disk = name, "the disk is unavailable: {why}");
        }
        let events = &self.worker_context.registry.events;
        events.send(EventKind::Error, name, None, Some(message));
    }

    /// Closes the kept descriptors of disks that are still unavailable at the end of the process,
    /// and removes the files of their sockets.
    pub fn end_unavailable(&self) {
        for (_, entry) in self.worker_context.table.all() {
            if entry.failed.is_some() {
                self.keeper().give_up(&entry.spec, "the process ends");
            }
        }
        self.worker_context.opener.idle.release_all();
    }
}
