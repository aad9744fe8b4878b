//! Questions to all instances of vnvme on this host (`--all`).

use super::target::ControlSocket;
use anyhow::{Result, bail};
use clap::Args;
use control::{Client, ClientError};
use daemon::api::{Instance, Instances};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use sync::Unpoisoned;

/// Maximum number of instances that are asked at a time: each question needs some descriptors.
pub const MAX_QUESTIONS: usize = 16;

/// Selection of all instances on this host.
#[derive(Args)]
pub struct AllInstances {
    /// Show all instances on this host, not only one: the control sockets named control.sock in
    /// /run/vnvme, in the user's directory, and in their subdirectories. --control names another
    /// directory to search, or a further socket
    #[arg(long)]
    pub all: bool,
}

/// Instance that does not answer.
#[derive(Clone, Debug, Serialize)]
pub struct Unanswered {
    pub instance: String,
    /// Path of the control socket.
    pub control: PathBuf,
    /// Reason why there is no answer, as text.
    pub error: String,
}

/// Answers of instances, in the order of the instances, and the instances without an answer.
pub struct Answers<T> {
    pub answers: Vec<(String, T)>,
    pub unanswered: Vec<Unanswered>,
}

/// Finds all instances.
///
/// # Errors
/// There is none.
pub fn find(control: &ControlSocket) -> Result<Vec<Instance>> {
    let all = Instances::find(control.path());
    if all.found.is_empty() {
        let searched = all.searched.iter().map(|path| path.display().to_string());
        bail!(
            "no instance of vnvme is there: no control.sock in {}, or in a subdirectory; start one, \
             or name its directory or control socket with --control PATH",
            searched.collect::<Vec<_>>().join(", ")
        );
    }
    Ok(all.found)
}

/// Asks an instance.
pub fn ask<T>(
    instance: &Instance,
    question: impl Fn(&Client) -> Result<T, ClientError>,
) -> Result<T, Unanswered> {
    let client = Client::new(instance.sockets.clone());
    client
        .and_then(|client| question(&client))
        .map_err(|error| Unanswered {
            instance: instance.name.clone(),
            control: instance.sockets.first().cloned().unwrap_or_default(),
            error: error.cause(),
        })
}

/// Asks instances at the same time, so that one that does not answer delays the others by the time
/// limit of one question at most.
pub fn ask_all<T: Send>(
    instances: &[Instance],
    question: impl Fn(&Client) -> Result<T, ClientError> + Sync,
) -> Answers<T> {
    let (next, all) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(instance) = instances.get(at) else {
                return;
            };
            let answer = ask(instance, &question).map(|answer| (instance.name.clone(), answer));
            all.lock().unpoisoned().push((at, answer));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..instances.len().min(MAX_QUESTIONS) {
            // Without a further thread, this one asks more instances.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    let mut all = all.into_inner().unpoisoned();
    all.sort_by_key(|(at, _)| *at);
    let mut answers = Answers {
        answers: Vec::new(),
        unanswered: Vec::new(),
    };
    for (_, answer) in all {
        match answer {
            Ok(answer) => answers.answers.push(answer),
            Err(unanswered) => answers.unanswered.push(unanswered),
        }
    }
    answers
}

/// Fails if an instance does not answer, after the answers of the others were printed.
///
/// # Errors
/// The instances without an answer, with the reasons.
pub fn check(unanswered: &[Unanswered]) -> Result<()> {
    let reasons = unanswered
        .iter()
        .map(|one| format!("{} does not answer: {}", one.instance, one.error));
    let reasons: Vec<String> = reasons.collect();
    if reasons.is_empty() {
        return Ok(());
    }
    bail!("{}", reasons.join("\n"))
}
