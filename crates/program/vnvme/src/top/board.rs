//! Snapshots of all instances, requested by threads in the background, so that an instance that
//! does not answer delays neither the screen nor the others.

use crate::cli::instances::{MAX_QUESTIONS, Unanswered, ask};
use daemon::api::Instance;
use metrics::Snapshot;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Pause after an instance did not answer.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// Instances with their newest answers.
pub struct Board(Arc<Shared>);

struct Shared {
    slots: Mutex<Vec<Slot>>,
    /// Signalled when instances were added.
    changed: Condvar,
    /// Time between two questions to an instance.
    interval: Duration,
}

/// Answer of an instance.
pub type Arrived = Result<Snapshot, Unanswered>;

struct Slot {
    instance: Instance,
    /// Whether a thread waits for the answer.
    is_asked: bool,
    /// Time of the next question.
    due: Instant,
    /// Answer that was not taken yet.
    arrived: Option<Arrived>,
}

impl Board {
    /// Starts the threads that ask the instances, which end with the process.
    pub fn new(interval: Duration) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            slots: Mutex::new(Vec::new()),
            changed: Condvar::new(),
            interval,
        });
        for _ in 0..MAX_QUESTIONS {
            let shared = shared.clone();
            let builder = std::thread::Builder::new().name("ask".into());
            builder.spawn(move || shared.work())?;
        }
        Ok(Self(shared))
    }

    /// Replaces the list of instances, and returns those of them that have answered since the last
    /// call.
    pub fn refresh(&self, instances: Vec<Instance>) -> Vec<(String, Arrived)> {
        let mut slots = self.0.slots.lock().unpoisoned();
        slots.retain(|slot| instances.contains(&slot.instance));
        for instance in instances {
            if !slots.iter().any(|slot| slot.instance == instance) {
                slots.push(Slot {
                    instance,
                    is_asked: false,
                    due: Instant::now(),
                    arrived: None,
                });
            }
        }
        self.0.changed.notify_all();
        let arrived = slots.iter_mut().filter_map(|slot| {
            let arrived = slot.arrived.take()?;
            Some((slot.instance.name.clone(), arrived))
        });
        arrived.collect()
    }
}

impl Shared {
    /// Asks instances as they are due.
    fn work(&self) {
        loop {
            let instance = self.next();
            let answer = ask(&instance, |client| Ok(client.stats()?.measured));
            let mut slots = self.slots.lock().unpoisoned();
            let slot = slots.iter_mut().find(|slot| slot.instance == instance);
            // The instance may have been removed meanwhile.
            if let Some(slot) = slot {
                let pause = match &answer {
                    Ok(_) => self.interval,
                    Err(_) => self.interval.max(RETRY_INTERVAL),
                };
                slot.due = Instant::now() + pause;
                slot.is_asked = false;
                slot.arrived = Some(answer);
            }
        }
    }

    /// Waits until an instance is due, and returns it.
    fn next(&self) -> Instance {
        let mut slots = self.slots.lock().unpoisoned();
        loop {
            let now = Instant::now();
            let idle = slots.iter_mut().filter(|slot| !slot.is_asked);
            let first = idle.min_by_key(|slot| slot.due);
            let pause = match first {
                Some(slot) if slot.due <= now => {
                    slot.is_asked = true;
                    return slot.instance.clone();
                }
                Some(slot) => slot.due - now,
                None => RETRY_INTERVAL,
            };
            let waited = self.changed.wait_timeout(slots, pause);
            slots = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
