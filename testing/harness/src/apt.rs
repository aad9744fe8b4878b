//! Debian packages fetched into the cache with the machine's own `apt-get`, without
//! root and without installing.
//!
//! `apt-get` is given a sources list, package lists, a download directory and an empty dpkg status
//! of its own, so it neither reads nor changes installed packages. Signatures are checked as
//! always, against Debian's archive keyring; a machine that has no such keyring (Ubuntu) gets it
//! from its own archive, unpacked into the cache as well.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};

use crate::cache::Cache;
use crate::mirror::{OLDER, keyring, mirrors, newer_keyring};
use crate::progress::say;

/// A package as `apt-get --print-uris` announces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    /// Binary package name.
    pub name: String,
    /// Full version, with its epoch.
    pub version: String,
    /// Size of the `.deb` in bytes.
    pub size: u64,
}

/// A private apt for some suites of Debian.
#[derive(Debug)]
pub struct Apt {
    dir: PathBuf,
    suites: String,
    architecture: &'static str,
}

const NOT_SERVED: &str = "no mirror serves";

/// The architecture of the host's own tools and of the guest that most tests run.
pub const AMD64: &str = "amd64";

impl Apt {
    /// Prepares an apt of its own for `suites` and fetches their indices.
    pub fn open(cache: &Cache, suites: &[&str]) -> Result<Apt> {
        Apt::open_for(cache, suites, AMD64)
    }

    /// Opens an apt for packages of another architecture, which are only unpacked here.
    pub fn open_for(cache: &Cache, suites: &[&str], architecture: &'static str) -> Result<Apt> {
        for program in ["apt-get", "dpkg-deb"] {
            if !on_path(program) {
                bail!(
                    "{program} is not on this machine: the guest is made of Debian packages (apt install apt dpkg, \
                     or run on Debian or Ubuntu)"
                );
            }
        }
        let mut name = format!("apt-{}", suites.join("-"));
        if architecture != AMD64 {
            name = format!("{name}-{architecture}");
        }
        let dir = cache.path(name);
        for sub in ["lists/partial", "cache/archives/partial", "etc"] {
            fs::create_dir_all(dir.join(sub))?;
        }
        fs::write(dir.join("status"), "")?;
        let apt = Apt {
            dir,
            suites: suites.join(" "),
            architecture,
        };
        let first = match apt.update(&keyring(cache)?) {
            Ok(()) => return Ok(apt),
            Err(e) => e,
        };
        // A machine older than the suites may lack their keys; a release in between has both.
        if !first.to_string().contains("NO_PUBKEY") || suites == [OLDER] {
            return Err(first);
        }
        let keyring = newer_keyring(cache).with_context(|| format!("{first:#}"))?;
        apt.update(&keyring)?;
        Ok(apt)
    }

    /// Fetches the indices from the first mirror that serves them.
    fn update(&self, keyring: &Path) -> Result<()> {
        let mut failures = String::new();
        for mirror in mirrors() {
            self.write_sources(&mirror, keyring)?;
            say(format!(
                "apt: package lists of {} from {mirror}",
                self.suites
            ));
            match self.run(&["update"], &self.dir) {
                Ok(_) => return Ok(()),
                Err(e) => failures.push_str(&format!("\n{mirror}: {e:#}")),
            }
        }
        bail!("{NOT_SERVED} {}:{failures}", self.suites)
    }

    /// Everything that `wanted` depends on, recommended packages left out, as if nothing were
    /// installed. `release` prefers one suite, as apt's `-t` does.
    pub fn closure(&self, release: Option<&str>, wanted: &[&str]) -> Result<Vec<Package>> {
        let mut args = vec!["--no-install-recommends", "--print-uris", "--yes"];
        if let Some(release) = release {
            args.extend(["-t", release]);
        }
        args.push("install");
        args.extend(wanted);
        let out = self.run(&args, &self.dir)?;
        let packages: Vec<Package> = out.lines().filter_map(parse_uri).collect();
        if packages.is_empty() {
            bail!("apt named no package for {wanted:?}:\n{out}");
        }
        Ok(packages)
    }

    /// The version that `-t release` would choose for `package`, if the suites have it.
    pub fn candidate(&self, release: Option<&str>, package: &str) -> Result<Option<String>> {
        let all = match self.closure(release, &[package]) {
            Ok(all) => all,
            Err(_) => return Ok(None),
        };
        Ok(all
            .into_iter()
            .find(|p| p.name == package)
            .map(|p| p.version))
    }

    /// Downloads `packages` (apt checks each against the signed index) and
    /// unpacks them below `into`.
    pub fn unpack(&self, packages: &[Package], into: &Path) -> Result<()> {
        let debs = tempfile::tempdir_in(&self.dir)?;
        let names: Vec<String> = packages
            .iter()
            .map(|p| format!("{}={}", p.name, p.version))
            .collect();
        let bytes: u64 = packages.iter().map(|p| p.size).sum();
        say(format!(
            "apt: fetching {} packages, {} MB",
            packages.len(),
            bytes / 1_000_000
        ));
        let mut args = vec!["download"];
        args.extend(names.iter().map(String::as_str));
        let fetched = self.run(&args, debs.path());
        fetched.map_err(|e| not_served(&e).unwrap_or(e))?;
        say(format!("apt: unpacking {} packages", packages.len()));
        // The directories that base-files would have made: one /usr, so that no package makes a
        // second /lib.
        for dir in ["bin", "sbin", "lib", "lib64"] {
            fs::create_dir_all(into.join("usr").join(dir))?;
            std::os::unix::fs::symlink(format!("usr/{dir}"), into.join(dir))?;
        }
        for deb in fs::read_dir(debs.path())? {
            let deb = deb?.path();
            let out = Command::new("dpkg-deb")
                .arg("-x")
                .args([&deb, into])
                .output()
                .context("running dpkg-deb")?;
            if !out.status.success() {
                bail!(
                    "dpkg-deb cannot unpack {}: {}",
                    deb.display(),
                    String::from_utf8_lossy(&out.stderr).trim()
                );
            }
        }
        Ok(())
    }

    fn write_sources(&self, mirror: &str, keyring: &Path) -> Result<()> {
        let sources = format!(
            "Types: deb\nURIs: {mirror}\nSuites: {}\nComponents: main\nArchitectures: {}\nSigned-By: {}\n",
            self.suites,
            self.architecture,
            keyring.display()
        );
        fs::write(self.dir.join("debian.sources"), sources)?;
        Ok(())
    }

    /// Runs apt-get with this apt's own directories; answers its standard output.
    fn run(&self, args: &[&str], cwd: &Path) -> Result<String> {
        let mut command = Command::new("apt-get");
        command.current_dir(cwd);
        let dir = |sub: &str| self.dir.join(sub).display().to_string();
        // The machine's own apt.conf.d is left out, for its hooks are not ours to run; its
        // way to the network is kept.
        let config = self.dir.join("apt.conf");
        let text = format!("Dir::Etc::parts \"{}\";\n{}", dir("etc"), network_config()?);
        fs::write(&config, text)?;
        command.env("APT_CONFIG", &config);
        let options = [
            format!("Dir::Etc::sourcelist={}", dir("debian.sources")),
            format!("Dir::Etc::sourceparts={}", dir("etc")),
            format!("Dir::Etc::preferencesparts={}", dir("etc")),
            format!("Dir::Etc::preferences={}", dir("etc/none")),
            format!("Dir::State={}", self.dir.display()),
            format!("Dir::State::lists={}", dir("lists")),
            format!("Dir::State::status={}", dir("status")),
            format!("Dir::Cache={}", dir("cache")),
            format!("APT::Architecture={}", self.architecture),
            format!("APT::Architectures={}", self.architecture),
            "APT::Sandbox::User=root".into(),
            "APT::Get::List-Cleanup=true".into(),
            "Debug::NoLocking=true".into(),
            "Acquire::Languages=none".into(),
            "Acquire::Retries=3".into(),
            "Acquire::http::Timeout=30".into(),
        ];
        for option in options {
            command.args(["-o", &option]);
        }
        capture(command.args(args))
    }
}

/// Runs a command to its end, its standard error on ours only when it fails;
/// answers its standard output.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let shown = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {shown}"))?;
    let stderr = child.stderr.take();
    let errors = std::thread::spawn(move || {
        let lines = stderr.map(|e| BufReader::new(e).lines().map_while(Result::ok));
        lines.map_or_else(String::new, |l| l.collect::<Vec<_>>().join("\n"))
    });
    let mut out = String::new();
    let mut fetched = 0;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line?;
            if line.starts_with("Get:") {
                fetched += 1;
                if fetched % 25 == 0 {
                    say(format!("apt: {fetched} files fetched"));
                }
            }
            out.push_str(&line);
            out.push('\n');
        }
    }
    let status = child.wait()?;
    let errors = errors.join().unwrap_or_default();
    if !status.success() {
        bail!("{shown} failed ({status}):\n{out}{errors}");
    }
    Ok(out)
}

/// Returns the names of packages that the mirror does not have (it is in the middle of a
/// synchronisation), if the error contains any.
fn not_served(error: &anyhow::Error) -> Option<anyhow::Error> {
    let said = error.to_string();
    let missing: Vec<&str> = said
        .lines()
        .filter_map(|line| line.strip_prefix("E: Failed to fetch "))
        .filter_map(|line| Some(line.split_once(" 404 ")?.0.trim_end()))
        .collect();
    (!missing.is_empty()).then(|| anyhow!("{NOT_SERVED} {}", missing.join(" ")))
}

/// Mirrors do not have lists or packages now.
pub fn is_not_served(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains(NOT_SERVED)
}

/// Reads `'URI' FILE SIZE ...`, where FILE is `name_version_architecture.deb`
/// with `:` written as `%3a`.
fn parse_uri(line: &str) -> Option<Package> {
    let mut words = line.strip_prefix('\'')?.split_whitespace().skip(1);
    let (file, size) = (words.next()?, words.next()?);
    let mut parts = file.strip_suffix(".deb")?.split('_');
    let (name, version) = (parts.next()?, parts.next()?);
    Some(Package {
        name: name.to_string(),
        version: version.replace("%3a", ":"),
        size: size.parse().ok()?,
    })
}

/// The `Acquire` part of the machine's apt configuration (proxies, certificates, clock),
/// without its index targets.
fn network_config() -> Result<String> {
    let dump = Command::new("apt-config")
        .arg("dump")
        .output()
        .context("running apt-config")?;
    let mut config = String::from("Dir::Etc::main \"none\";\n");
    for line in String::from_utf8_lossy(&dump.stdout).lines() {
        let keep = line.starts_with("Acquire::")
            && !line.starts_with("Acquire::IndexTargets")
            && !line.starts_with("Acquire::Languages")
            && !line.starts_with("Acquire::GzipIndexes");
        // A name without a value is a list's head; it carries nothing.
        if keep && !line.ends_with(" \"\";") {
            config.push_str(line);
            config.push('\n');
        }
    }
    Ok(config)
}

/// Whether a program is on the search path.
pub fn on_path(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_packages_are_named() {
        let said = "apt-get failed (exit status: 100):\nErr:6 http://m/a libc6 404  Not Found\n\
                    E: Failed to fetch http://m/debian/libc6.deb  404  Not Found [IP: ::1 80]\n\
                    E: Failed to fetch http://m/debian/zlib1g.deb  404  Not Found [IP: ::1 80]";
        let missing = not_served(&anyhow!(said)).unwrap().to_string();
        let both = "http://m/debian/libc6.deb http://m/debian/zlib1g.deb";
        assert_eq!(missing, format!("no mirror serves {both}"));
        let refused = "E: Failed to fetch http://m/debian/libc6.deb  Connection refused";
        assert!(not_served(&anyhow!(refused)).is_none());
    }

    #[test]
    fn print_uris_lines_are_parsed_as_packages() {
        let line = "'http://m/debian/pool/main/b/busybox/busybox-static_1.37.0-6%2bb9_amd64.deb' \
                    busybox-static_1%3a1.37.0-6+b9_amd64.deb 955316 SHA256:598a";
        assert_eq!(
            parse_uri(line),
            Some(Package {
                name: "busybox-static".into(),
                version: "1:1.37.0-6+b9".into(),
                size: 955_316,
            })
        );
        assert_eq!(parse_uri("Reading package lists..."), None);
    }
}
