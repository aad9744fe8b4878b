//! The suite's own processes: the neighbour, the honest client, the attack, the FUSE server. Each
//! is this program with other words, ends when its standard input does, and is killed at the end.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child as StdChild, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use sync::Unpoisoned;

use super::attacks::{ATTACKS, Context};
use super::client::fuse;
use super::neighbour;

/// The first word of such a process.
pub(super) const WORD: &str = "child";

/// An attack that cannot be tried here.
#[derive(Debug)]
pub(super) struct Skip(String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// Creates the error of an attack that cannot be tried here.
pub(super) fn skip(why: String) -> anyhow::Error {
    Skip(why).into()
}

/// A process of the suite, with its output lines.
pub(super) struct Child {
    process: StdChild,
    stdin: Option<ChildStdin>,
    lines: Arc<Mutex<Vec<(Instant, String)>>>,
}

impl Child {
    /// Starts a process of the kind `what`, with its name, its directory, and whether it has
    /// seconds.
    pub(super) fn start(what: &str, name: &str, dir: &Path, long: bool) -> Result<Self> {
        let long = if long { "long" } else { "short" };
        let mut process = Command::new(std::env::current_exe()?)
            .args([WORD, what, name, long])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let stdout = process.stdout.take().context("no output")?;
        let stdin = process.stdin.take();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let all = lines.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                all.lock().unpoisoned().push((Instant::now(), line));
            }
        });
        Ok(Self {
            process,
            stdin,
            lines,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(super) fn lines(&self) -> MutexGuard<'_, Vec<(Instant, String)>> {
        self.lines.lock().unpoisoned()
    }

    /// Waits until the process has printed a line that begins with `word`; returns the rest of the
    /// line.
    pub(super) fn wait_for(&mut self, word: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(rest) = self.said(word) {
                return Ok(rest);
            }
            if let Some(why) = self.said("skip ") {
                return Err(skip(why));
            }
            if let Some(why) = self.said("failed ") {
                bail!("{why}");
            }
            if let Some(status) = self.process.try_wait()? {
                bail!("it ended: {status}");
            }
            if Instant::now() > deadline {
                bail!("it never said {word:?}");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The rest of the newest line that begins so.
    pub(super) fn said(&self, word: &str) -> Option<String> {
        let lines = self.lines();
        let mut found = lines.iter().rev().filter_map(|(_, l)| l.strip_prefix(word));
        found.next().map(str::to_owned)
    }

    /// Asks it to end, and kills it if it does not by then. One that has files of a silent file
    /// system ends no sooner than the file system's server does.
    pub(super) fn end(&mut self, limit: Duration) {
        self.stdin = None;
        if self.ends_within(limit) {
            return;
        }
        let _ = self.process.kill();
        self.ends_within(Duration::from_secs(1));
    }

    fn ends_within(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            if matches!(self.process.try_wait(), Ok(Some(_))) {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

/// Runs such a process, from the words after [`WORD`].
pub(super) fn main(words: &[String]) -> Result<()> {
    let [what, name, long, dir] = words else {
        bail!("{WORD}: WHAT NAME LENGTH DIRECTORY");
    };
    let dir = Path::new(dir);
    // Whatever happens to its parent.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    if what != "good" && what != "fuse" {
        // The processors' sharing by the kernel is not measured here: clients on the daemon's other
        // side give way.
        let _ = rustix::process::nice(19);
    }
    let long = long == "long";
    match what.as_str() {
        "attack" => return attack(name, dir, long),
        // Only reads, and always enough of them that the worker could do nothing else.
        "honest" => {
            neighbour::fill(dir)?;
            return attack("deep-memory", dir, long);
        }
        _ => {}
    }
    let work = match what.as_str() {
        "good" => neighbour::good(dir),
        "fuse" => fuse::mount_and_serve(dir).map_err(|error| skip(format!("{error:#}"))),
        _ => bail!("{WORD}: {what}"),
    };
    if let Err(error) = work {
        say(&error);
    }
    Ok(())
}

fn say(error: &anyhow::Error) {
    match error.downcast_ref::<Skip>() {
        Some(why) => println!("skip {why}"),
        None => println!("failed {error:#}"),
    }
}

fn attack(name: &str, dir: &Path, long: bool) -> Result<()> {
    let attack = ATTACKS.iter().find(|attack| attack.name == name);
    let attack = attack.context("no such attack")?;
    let context = Arc::new(Context {
        dir: dir.to_owned(),
        stop: false.into(),
        done: 0.into(),
        long,
    });
    let told = context.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        told.stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let counted = context.clone();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(20));
            let done = counted.done.load(std::sync::atomic::Ordering::Relaxed);
            println!("did {done}");
        }
    });
    println!("ready");
    while !context.stop.load(std::sync::atomic::Ordering::Relaxed) {
        match (attack.run)(&context) {
            Ok(()) => {}
            Err(error) => {
                say(&error);
                if error.is::<Skip>() {
                    return Ok(());
                }
                // Disconnected, most likely; it connects again.
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
    Ok(())
}
