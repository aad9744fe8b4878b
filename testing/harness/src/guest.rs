//! Guests: a virtual machine with NVMe disks, booted in seconds, that runs
//! shell scripts for the harness.

use std::ffi::OsString;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use crate::cache::Cache;
use crate::channel::{Channel, Events, Reply, accept};
use crate::image::{Image, LIBRARY};
use crate::machine::{GuestBuilder, PROGRAMS};
use crate::process::Process;
use crate::qemu::Qemu;
use crate::qmp::Qmp;
use sync::Unpoisoned;

/// Exit status and output of a script.
#[derive(Clone, Debug)]
pub struct Output {
    /// Exit status as a shell reports it; 137 for a script that ran out of time.
    pub status: i32,
    /// Standard output and standard error together.
    pub stdout: Vec<u8>,
}

impl Output {
    /// The output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// A running guest; dropping it ends its QEMU.
#[derive(Debug)]
pub struct Guest {
    name: String,
    process: Process,
    control: Option<Mutex<Control>>,
    qmp: Mutex<Qmp>,
    events: Events,
    console: PathBuf,
    log: PathBuf,
    boot_limit: Duration,
    boot_seconds: f32,
    /// The command line of QEMU.
    command: String,
    dir: tempfile::TempDir,
}

#[derive(Debug)]
struct Control {
    channel: Channel,
    boot: String,
}

/// Default bound for one script: generous, as other guests may have the processors.
const SCRIPT_LIMIT: Duration = Duration::from_secs(180);

impl GuestBuilder {
    /// Starts QEMU and, unless the guest boots from its disk or comes by migration, waits until it
    /// takes scripts.
    pub fn boot(self) -> Result<Guest> {
        let cache = Cache::open()?;
        let mut image = Image::get(&cache)?;
        if self.newer_kernel {
            image = image.with_newer_kernel(&cache)?;
        }
        if let Some(kernel) = &self.kernel {
            image.kernel = kernel.clone();
        }
        let qemu = Qemu::find(&cache)?;
        let accel = match self.accel {
            Some(accel) => accel,
            None => qemu.accel(&cache)?,
        };
        let launch = Launch {
            name: self.name.clone(),
            words: qemu.words.clone(),
            envs: qemu.envs.clone(),
            scripts: !self.boot_disk,
            incoming: self.incoming,
            boot_limit: self.boot_limit,
            limit: self.limit,
        };
        let guest = launch.boot(&cache, |dir, console| {
            self.arguments(&cache, &image, accel, dir, console)
        })?;
        if !self.programs.is_empty() && !self.incoming {
            guest.run(&format!(
                "mkdir /run/programs
                 for s in /sys/block/vd*/serial; do
                     [ \"$(cat $s)\" = {PROGRAMS} ] && d=$(basename ${{s%/serial}})
                 done
                 mount -t ext4 -o ro,noload /dev/$d /run/programs && ln -s /run/programs/* /tmp/"
            ))?;
        }
        Ok(guest)
    }
}

/// Default bound for a boot, and for a reboot: on a machine with much other work, QEMU's translator
/// takes minutes.
pub(crate) const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// Default bound for a guest's whole life.
pub(crate) const LIFE_LIMIT: Duration = Duration::from_secs(3600);

/// Parameters for starting a QEMU of any machine.
#[derive(Debug)]
pub(crate) struct Launch {
    /// Names the logs.
    pub name: String,
    /// The words that start QEMU.
    pub words: Vec<OsString>,
    /// Environment of QEMU.
    pub envs: Vec<(String, OsString)>,
    /// Whether the guest takes scripts by the harness's init.
    pub scripts: bool,
    /// Whether QEMU waits for a migration instead of booting a guest.
    pub incoming: bool,
    /// Bounds each boot.
    pub boot_limit: Duration,
    /// Bounds the guest's whole life.
    pub limit: Duration,
}

impl Launch {
    /// Starts QEMU with the arguments that are made for a directory, where its sockets
    /// `agent`, `events` and `qmp` are, and for the console's file; waits until the guest
    /// takes scripts, if it does.
    pub(crate) fn boot(
        self,
        cache: &Cache,
        arguments: impl FnOnce(&Path, &Path) -> Result<Vec<OsString>>,
    ) -> Result<Guest> {
        let (console, log) = log_files(cache, &self.name)?;
        // A socket's path must be short, so these do not live below the cache.
        let dir = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
        let listen = |name: &str| UnixListener::bind(dir.path().join(name));
        let (agent, events, qmp) = (listen("agent")?, listen("events")?, listen("qmp")?);
        let mut words = self.words;
        words.extend(arguments(dir.path(), &console)?);
        let command = shell_line(&words);
        let started = Instant::now();
        let deadline = started + self.boot_limit;
        let process = Process::start(
            &format!("qemu-{}", self.name),
            &words,
            &self.envs,
            &log,
            self.limit,
        )?;
        let alive = || process.ended().is_none();
        let tails = || format!("{}{}", tail("QEMU", &log), tail("console", &console));
        let connect = || -> Result<_> {
            let qmp = Qmp::open(accept(&qmp, deadline, alive)?)?;
            if !self.scripts {
                return Ok((qmp, None, Events::default()));
            }
            let mut channel = Channel::new(accept(&agent, deadline, alive)?);
            let events = Events::collect(accept(&events, deadline, alive)?)?;
            let boot = if self.incoming {
                String::new()
            } else {
                channel.ready(deadline)?.0
            };
            Ok((qmp, Some(Mutex::new(Control { channel, boot })), events))
        };
        let (qmp, control, events) =
            connect().with_context(|| format!("guest {} does not boot{}", self.name, tails()))?;
        Ok(Guest {
            name: self.name,
            process,
            control,
            qmp: Mutex::new(qmp),
            events,
            console,
            log,
            boot_limit: self.boot_limit,
            boot_seconds: started.elapsed().as_secs_f32(),
            command,
            dir,
        })
    }
}

impl Guest {
    /// Seconds from QEMU's start until the guest took scripts.
    pub fn boot_seconds(&self) -> f32 {
        self.boot_seconds
    }

    /// The command line that started QEMU, as a shell would read it.
    pub fn command(&self) -> &str {
        &self.command
    }

    /// Runs a shell script in the guest, bounded to a minute.
    pub fn sh(&self, script: &str) -> Result<Output> {
        self.sh_for(SCRIPT_LIMIT, script)
    }

    /// Runs a shell script in the guest; after `limit` it is killed there and answers 137.
    pub fn sh_for(&self, limit: Duration, script: &str) -> Result<Output> {
        let reply = self.explain(|control| control.channel.run(script, limit))?;
        Ok(Output {
            status: reply.status,
            stdout: reply.data,
        })
    }

    /// Runs a script that must succeed; returns its output.
    pub fn run(&self, script: &str) -> Result<String> {
        self.run_for(SCRIPT_LIMIT, script)
    }

    /// Runs a script that must succeed within `limit`; returns its output.
    pub fn run_for(&self, limit: Duration, script: &str) -> Result<String> {
        let output = self.sh_for(limit, script)?;
        if output.status != 0 {
            bail!(
                "in guest {}, status {} of:\n{script}\nit printed:\n{}{}",
                self.name,
                output.status,
                output.text(),
                tail("console", &self.console)
            );
        }
        Ok(output.text())
    }

    /// Writes a file in the guest.
    pub fn push_file(&self, path: &str, mode: u32, data: &[u8]) -> Result<()> {
        let reply = self.explain(|c| c.channel.put(path, mode, data, SCRIPT_LIMIT))?;
        done(&reply, path)
    }

    /// Puts programs of ours into the guest's /tmp, with the library that they may need beyond the
    /// tools' (`LD_LIBRARY_PATH=/tools/lib:/tmp`).
    pub fn push_programs(&self, programs: &[PathBuf]) -> Result<()> {
        let tree = Image::get(&Cache::open()?)?.tree;
        let push = |name: &str, file: &Path| -> Result<()> {
            let bytes = fs::read(file).with_context(|| file.display().to_string())?;
            self.push_file(&format!("/tmp/{name}"), 0o755, &bytes)
        };
        for program in programs {
            let name = program.file_name().context("a program without a name")?;
            push(&name.to_string_lossy(), program)?;
            if let Some(library) = tree.libraries_of(program)?.get(LIBRARY) {
                push(LIBRARY, library)?;
            }
        }
        Ok(())
    }

    /// Reads a file of the guest.
    pub fn pull_file(&self, path: &str) -> Result<Vec<u8>> {
        let reply = self.explain(|c| c.channel.get(path, SCRIPT_LIMIT))?;
        done(&reply, path)?;
        Ok(reply.data)
    }

    /// Reboots the guest within the same QEMU and waits until it takes scripts again.
    pub fn reboot(&self) -> Result<()> {
        self.qmp("set-action", json!({"reboot": "reset"}))?;
        self.explain(|control| {
            control.channel.send("REBOOT")?;
            control.rebooted(self.boot_limit)
        })?;
        self.qmp("set-action", json!({"reboot": "shutdown"}))?;
        Ok(())
    }

    /// Resets the machine from outside, as its reset button does, and waits
    /// until it takes scripts again.
    pub fn hard_reset(&self) -> Result<()> {
        self.qmp("set-action", json!({"reboot": "reset"}))?;
        self.qmp("system_reset", json!({}))?;
        self.explain(|control| control.rebooted(self.boot_limit))?;
        self.qmp("set-action", json!({"reboot": "shutdown"}))?;
        Ok(())
    }

    /// Powers the guest off and waits until QEMU has ended.
    pub fn poweroff(self) -> Result<()> {
        self.explain(|control| control.channel.send("POWEROFF"))?;
        let status = self.process.wait(Duration::from_secs(60));
        let status = status.with_context(|| self.tails())?;
        if !status.success() {
            bail!("QEMU ended with {status}{}", self.tails());
        }
        Ok(())
    }

    /// Executes a QMP command.
    pub fn qmp(&self, command: &str, arguments: Value) -> Result<Value> {
        let mut qmp = self.qmp.lock().unpoisoned();
        qmp.execute(command, arguments)
            .with_context(|| self.tails())
    }

    /// Waits for an event of QEMU that `wanted` accepts, and returns it.
    pub fn wait_event(&self, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let mut qmp = self.qmp.lock().unpoisoned();
        qmp.wait_event(limit, wanted).with_context(|| self.tails())
    }

    /// Begins a migration to an address of QEMU's syntax. It cannot end before
    /// [`Guest::finish_migration`], because the guest may not be paused for long enough.
    pub fn begin_migration(&self, uri: &str) -> Result<()> {
        self.enable_migration_events()?;
        self.qmp("migrate-set-parameters", json!({"downtime-limit": 0}))?;
        // An earlier migration has left events.
        self.qmp.lock().unpoisoned().take_events();
        self.qmp("migrate", json!({"uri": uri})).map(drop)
    }

    /// Waits until memory was copied `passes` times, and lets the migration end. `limit` bounds
    /// each step.
    pub fn finish_migration(&self, passes: u64, limit: Duration) -> Result<()> {
        let event = self.wait_event(limit, |event| {
            let pass = event["data"]["pass"].as_u64();
            is_migration_end(event) || pass.is_some_and(|pass| pass >= passes)
        })?;
        if is_migration_end(&event) {
            return self.check_migration("completed", &event);
        }
        self.qmp("migrate-set-parameters", json!({"downtime-limit": 600_000}))?;
        self.wait_migration("completed", limit)
    }

    /// Waits until the migration has ended, which must have this status.
    pub fn wait_migration(&self, status: &str, limit: Duration) -> Result<()> {
        let event = self.wait_event(limit, is_migration_end)?;
        self.check_migration(status, &event)
    }

    fn check_migration(&self, status: &str, event: &Value) -> Result<()> {
        if event["data"]["status"] != status {
            let state = self.qmp("query-migrate", json!({}))?;
            bail!("the migration is not {status}: {state}{}", self.tails());
        }
        Ok(())
    }

    /// Migrates the guest to a QEMU that waits for it ([`GuestBuilder::incoming`]): copies memory
    /// `passes` times while the guest runs, and waits until the guest runs there. `limit` bounds
    /// each step.
    pub fn migrate(&self, target: &Guest, passes: u64, limit: Duration) -> Result<()> {
        let uri = format!("unix:{}", target.dir.path().join("migration").display());
        target.enable_migration_events()?;
        target.qmp("migrate-incoming", json!({"uri": uri}))?;
        let finished = self
            .begin_migration(&uri)
            .and_then(|()| self.finish_migration(passes, limit));
        finished.with_context(|| format!("destination:{}", target.tails()))?;
        target.wait_event(limit, |event| event["event"] == "RESUME")?;
        let boot = self.explain(|control| Ok(control.boot.clone()))?;
        target.explain(|control| {
            control.boot = boot;
            Ok(())
        })
    }

    fn enable_migration_events(&self) -> Result<()> {
        let capabilities = json!([{"capability": "events", "state": true}]);
        let arguments = json!({"capabilities": capabilities});
        self.qmp("migrate-set-capabilities", arguments).map(drop)
    }

    /// Lines that scripts send while they run, by `echo ... >&4`.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Kills QEMU, as a host that loses power would.
    pub fn kill(&self) -> Result<()> {
        self.process.kill()
    }

    /// The process of QEMU.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the file with QEMU's own output; it outlives the guest.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns all console output of the guest so far.
    pub fn console(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(&self.console)?).into_owned())
    }

    /// Waits until the console holds `text`.
    pub fn wait_console(&self, text: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let console = self.console()?;
            if console.contains(text) {
                return Ok(console);
            }
            if Instant::now() >= deadline || self.process.ended().is_some() {
                bail!("the console never showed {text:?}{}", self.tails());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn explain<T>(&self, action: impl FnOnce(&mut Control) -> Result<T>) -> Result<T> {
        let control = self.control.as_ref();
        let control = control.context("a guest that boots from its disk runs no scripts")?;
        let mut control: MutexGuard<'_, Control> = control.lock().unpoisoned();
        action(&mut control).map_err(|e| {
            let overdue = if self.process.overdue() {
                " (its time had passed)"
            } else {
                ""
            };
            anyhow!("guest {}{overdue}: {e:#}{}", self.name, self.tails())
        })
    }

    fn tails(&self) -> String {
        format!(
            "{}{}",
            tail("QEMU", &self.log),
            tail("console", &self.console)
        )
    }
}

/// Returns whether an event of QEMU announces the end of a migration.
fn is_migration_end(event: &Value) -> bool {
    let status = event["data"]["status"].as_str().unwrap_or_default();
    event["event"] == "MIGRATION" && ["completed", "failed", "cancelled"].contains(&status)
}

impl Control {
    fn rebooted(&mut self, limit: Duration) -> Result<()> {
        let (boot, _) = self.channel.ready(Instant::now() + limit)?;
        if boot == self.boot {
            bail!("the guest says that it is ready without having rebooted");
        }
        self.boot = boot;
        Ok(())
    }
}

/// Words as a shell reads them, with an option in each line.
fn shell_line(words: &[OsString]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    let quoted = words.iter().map(|word| {
        let word = word.to_string_lossy();
        if !word.is_empty() && word.chars().all(plain) {
            word.into_owned()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    });
    let mut line = String::new();
    for word in quoted {
        let between = match (line.is_empty(), word.starts_with('-')) {
            (true, _) => "",
            (false, true) => " \\\n    ",
            (false, false) => " ",
        };
        line.push_str(between);
        line.push_str(&word);
    }
    line
}

fn done(reply: &Reply, path: &str) -> Result<()> {
    if reply.status != 0 {
        bail!("{path} in the guest: status {}", reply.status);
    }
    Ok(())
}

/// Names for the logs of a guest: the console's, and QEMU's own.
fn log_files(cache: &Cache, name: &str) -> Result<(PathBuf, PathBuf)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let dir = cache.logs()?;
    let stem = format!(
        "{name}-{}-{}",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    );
    Ok((
        dir.join(format!("{stem}.console")),
        dir.join(format!("{stem}.qemu")),
    ))
}

/// The end of a log, for an error message.
pub fn tail(what: &str, path: &Path) -> String {
    const LINES: usize = 15;
    let bytes = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    if lines.is_empty() {
        return String::new();
    }
    let last = lines.iter().skip(lines.len().saturating_sub(LINES));
    let body: String = last.map(|l| format!("\n  | {l}")).collect();
    format!("\n  {what} ({}) ends with:{body}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_line_quotes_words() -> Result<()> {
        let words = [
            "printf",
            "%s|",
            "a -b",
            "",
            "it's",
            "-x",
            "{\"x\":\"$HOME\"}",
            "m=1,n=/a",
        ];
        let line = shell_line(&words.map(OsString::from));
        let output = std::process::Command::new("sh")
            .args(["-c", &line])
            .output()?;
        let wanted = words[2..].concat();
        assert_eq!(String::from_utf8(output.stdout)?.replace('|', ""), wanted);
        Ok(())
    }
}
