//! Mutants: defects that tests must find. `testing/harness/mutants.toml` lists them; each one is
//! applied to a worktree of its own, in which the tests that are meant to find it run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::report;
use crate::step::{TestOutcome, TestResult};

/// Path of the list of mutants, relative to the root of the workspace.
const LIST: &str = "testing/harness/mutants.toml";

#[derive(Deserialize)]
struct List {
    mutant: Vec<Mutant>,
}

/// A defect, and the tests that are meant to find it. [`LIST`] explains the fields.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutant {
    name: String,
    breaks: String,
    file: PathBuf,
    find: String,
    replace: String,
    tier: String,
    package: Option<String>,
    tests: String,
}

impl Mutant {
    /// Arguments of the test runner.
    fn arguments(&self) -> Vec<&str> {
        let package = self.package.as_deref().unwrap_or_default();
        let words = self.tests.split_whitespace();
        ["--package", package].into_iter().chain(words).collect()
    }

    /// Returns the name of the package that the changed file belongs to.
    fn package_of_file(&self, root: &Path) -> Result<String> {
        let folders = if self.file.starts_with("crates") {
            3
        } else {
            2
        };
        let folder: PathBuf = self.file.iter().take(folders).collect();
        let manifest = root.join(folder).join("Cargo.toml");
        let text = fs::read_to_string(&manifest).context(manifest.display().to_string())?;
        let table: toml::Table = text.parse().context(manifest.display().to_string())?;
        let name = table.get("package").and_then(|package| package.get("name"));
        let name = name.and_then(|name| name.as_str());
        Ok(name.context("a package without a name")?.to_owned())
    }
}

/// Result of one mutant's tests.
enum Verdict {
    /// A test has failed, as intended; the text is the name of the first one.
    Caught(String),
    Survived,
    /// No test ran, for example because the mutant does not compile.
    NotRun,
}

/// Applies mutants, one after the other, and runs their tests: `--seed TEXT --draw N` selects N of
/// them, names select others. True when each mutant made a test fail.
///
/// # Errors
/// A mutant is unknown or does not apply, tests fail without mutants, or git cannot be used.
pub fn run(target: &Path, words: &[String]) -> Result<bool> {
    let tree = worktree(target)?;
    let all = read(&tree)?;
    let mutants = match words {
        [option, seed, draws, count] if option == "--seed" && draws == "--draw" => {
            draw(all, seed, count.parse().context("--draw")?)
        }
        names => named(&all, names)?,
    };
    ensure!(!mutants.is_empty(), crate::USAGE);
    let mut known = Vec::new();
    for mutant in &mutants {
        let arguments = mutant.arguments();
        if !known.contains(&arguments) {
            println!("--- without mutants: {}", arguments.join(" "));
            let (passed, results) = tests(&tree, "none", mutant)?;
            let why = || format!("{}: tests fail without mutants", arguments.join(" "));
            ensure!(passed && !results.is_empty(), why());
            known.push(arguments);
        }
    }
    let mut table = format!(
        "{:24}{:12}{:>6}{:>9}  red test\n",
        "mutant", "tier", "tests", "s"
    );
    let mut all_caught = true;
    for mutant in &mutants {
        println!("--- {}: {}", mutant.name, mutant.breaks);
        let began = Instant::now();
        let applied = Applied::new(&tree, mutant)?;
        let (passed, results) = tests(&tree, &mutant.name, mutant)?;
        drop(applied);
        let verdict = verdict(passed, &results);
        all_caught &= matches!(verdict, Verdict::Caught(_));
        let line = line(mutant, results.len(), began.elapsed(), &verdict);
        print!("{line}");
        table.push_str(&line);
    }
    print!("\n{table}");
    Ok(all_caught)
}

/// Makes the worktree, or brings it to the present commit. Its `target` directory stays.
fn worktree(target: &Path) -> Result<PathBuf> {
    let tree = target.join("mutants");
    let git = |arguments: &[&str]| -> Result<String> {
        let output = Command::new("git").args(arguments).output();
        let output = output.context("starting git")?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "git {arguments:?}: {error}");
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    };
    let path = tree.to_string_lossy();
    if tree.join(".git").exists() {
        let head = git(&["rev-parse", "HEAD"])?;
        git(&[
            "-C", &path, "checkout", "--quiet", "--force", "--detach", &head,
        ])?;
    } else {
        git(&[
            "worktree", "add", "--quiet", "--force", "--detach", &path, "HEAD",
        ])?;
    }
    tree.canonicalize().context("the worktree of mutants")
}

fn read(root: &Path) -> Result<Vec<Mutant>> {
    let text = fs::read_to_string(root.join(LIST)).context(LIST)?;
    let List { mut mutant } = toml::from_str(&text).context(LIST)?;
    for mutant in &mut mutant {
        if mutant.package.is_none() {
            mutant.package = Some(mutant.package_of_file(root)?);
        }
    }
    Ok(mutant)
}

fn named(all: &[Mutant], names: &[String]) -> Result<Vec<Mutant>> {
    let find = |name: &String| {
        let found = all.iter().find(|mutant| mutant.name == *name);
        found
            .cloned()
            .with_context(|| format!("{name}: no such mutant in {LIST}"))
    };
    names.iter().map(find).collect()
}

/// Draws `count` mutants: the first ones of a permutation that the seed alone determines.
fn draw(mut mutants: Vec<Mutant>, seed: &str, count: usize) -> Vec<Mutant> {
    // FNV-1a, then SplitMix64.
    let hash = |state: u64, byte: u8| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let mut state = seed.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
    let mut random = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    };
    let count = count.min(mutants.len());
    for at in 0..count {
        let left = (mutants.len() - at) as u64;
        mutants.swap(at, at + (random() % left) as usize);
    }
    mutants.truncate(count);
    mutants
}

/// A mutant in the worktree; dropping it restores the file.
struct Applied {
    file: PathBuf,
    original: String,
}

impl Applied {
    fn new(tree: &Path, mutant: &Mutant) -> Result<Self> {
        let file = tree.join(&mutant.file);
        let original = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let changed = changed(&original, mutant)?;
        fs::write(&file, changed).with_context(|| file.display().to_string())?;
        Ok(Self { file, original })
    }
}

impl Drop for Applied {
    fn drop(&mut self) {
        // The next run checks the whole worktree out again.
        let _ = fs::write(&self.file, &self.original);
    }
}

fn changed(original: &str, mutant: &Mutant) -> Result<String> {
    let Mutant {
        name, file, find, ..
    } = mutant;
    match original.matches(find.as_str()).count() {
        1 => Ok(original.replace(find.as_str(), &mutant.replace)),
        count => bail!(
            "mutant {name}: {} has its text {count} times",
            file.display()
        ),
    }
}

/// Runs a mutant's tests in the worktree, by this program's own step `tests`. Returns whether all
/// passed, and the result of each.
fn tests(tree: &Path, name: &str, mutant: &Mutant) -> Result<(bool, Vec<TestResult>)> {
    let directory = tree.join("target/tier/mutants").join(name);
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory)?;
    let log = File::create(directory.join("output"))?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["tests", name])
        .args(mutant.arguments())
        .current_dir(tree)
        .env(crate::DIRECTORY, &directory)
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("VNVME_PROGRAMS")
        .stdout(log.try_clone()?)
        .stderr(log);
    // Guests are made once for the workspace and this tree.
    let cache = crate::target().join("harness");
    if let Ok(cache) = cache.canonicalize()
        && std::env::var_os("VNVME_HARNESS_CACHE").is_none()
    {
        command.env("VNVME_HARNESS_CACHE", cache);
    }
    let status = command.status().context("starting the tests")?;
    let results = report::lines(&directory.join("tests"))?;
    Ok((status.success(), results))
}

fn verdict(passed: bool, results: &[TestResult]) -> Verdict {
    let failed = results
        .iter()
        .find(|one| one.outcome == TestOutcome::Failed);
    match failed {
        Some(failed) => Verdict::Caught(failed.test.clone()),
        None if passed && !results.is_empty() => Verdict::Survived,
        None => Verdict::NotRun,
    }
}

fn line(mutant: &Mutant, tests: usize, took: Duration, verdict: &Verdict) -> String {
    let verdict = match verdict {
        Verdict::Caught(test) => test,
        Verdict::Survived => "SURVIVED",
        Verdict::NotRun => "NOT RUN",
    };
    let (name, tier, seconds) = (&mutant.name, &mutant.tier, took.as_secs_f64());
    format!("{name:24}{tier:12}{tests:>6}{seconds:>9.1}  {verdict}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    /// Text of all Rust files below a directory.
    fn sources(directory: &Path, text: &mut String) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("target") {
                sources(&path, text);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                text.push_str(&fs::read_to_string(path).unwrap());
            }
        }
    }

    #[test]
    fn every_mutant_applies_to_the_present_sources() {
        let all = read(&root()).unwrap();
        assert!(all.len() >= 60, "{} mutants", all.len());
        for (at, mutant) in all.iter().enumerate() {
            let original = fs::read_to_string(root().join(&mutant.file));
            let original = original.unwrap_or_else(|e| panic!("{}: {e}", mutant.file.display()));
            assert_ne!(changed(&original, mutant).unwrap(), original, "{mutant:?}");
            assert!(
                ["test", "test-guests"].contains(&&*mutant.tier),
                "{mutant:?}"
            );
            let others = all.iter().skip(at + 1);
            assert!(
                others.filter(|m| m.name == mutant.name).count() == 0,
                "{mutant:?}"
            );
        }
    }

    #[test]
    fn every_mutant_names_modules_and_tests_that_exist() {
        for mutant in read(&root()).unwrap() {
            let arguments = mutant.arguments();
            let folders = fs::read_dir(root().join("crates")).unwrap();
            let folders = folders.map(|folder| folder.unwrap().path());
            let crates = folders.chain([root().join("testing")]);
            let folder = arguments[1].strip_prefix("vnvme-").unwrap_or(arguments[1]);
            let mut crates = crates.map(|path| path.join(folder));
            let package = crates.find(|path| path.is_dir()).unwrap();
            let mut text = String::new();
            sources(&package, &mut text);
            let mut words = arguments.iter().skip(2);
            let programs = words.by_ref().take_while(|word| **word != "--");
            assert!(programs.count() > 0, "{}", mutant.name);
            for part in words
                .flat_map(|word| word.split("::"))
                .filter(|part| !part.is_empty())
            {
                // A test may be named by its beginning.
                let known = [format!("mod {part}"), format!("fn {part}")];
                assert!(
                    known.iter().any(|k| text.contains(k)),
                    "{}: {part}",
                    mutant.name
                );
            }
        }
    }

    #[test]
    fn draw_depends_on_nothing_but_the_seed() {
        let names = |seed: &str| -> Vec<String> {
            let drawn = draw(read(&root()).unwrap(), seed, 10);
            drawn.into_iter().map(|mutant| mutant.name).collect()
        };
        let mut drawn = names("a");
        assert_eq!(drawn, names("a"));
        assert_ne!(drawn, names("b"));
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), 10);
    }

    #[test]
    fn mutant_without_a_test_that_ran_is_not_caught() {
        assert!(matches!(verdict(false, &[]), Verdict::NotRun));
        assert!(matches!(verdict(true, &[]), Verdict::NotRun));
    }
}
