//! `testing/harness/skips.sh`, in which `make test` runs: skipped tests are printed, and a skip
//! that is not on the list fails in CI.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

struct Ran {
    code: Option<i32>,
    text: String,
}

/// Runs a shell script as `make test` runs its tests, with a list of accepted skips or the
/// repository's own.
fn run(script: &str, list: Option<&str>, ci: bool) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("skips.txt");
    std::fs::write(&file, "left::over: from the run before\n").unwrap();
    let mut command = Command::new(root().join("testing/harness/skips.sh"));
    command.args(["sh", "-c", script]).current_dir(root());
    command.env(testkit::FILE, &file).env_remove("CI");
    if let Some(list) = list {
        let path = dir.path().join("list");
        std::fs::write(&path, list).unwrap();
        command.env("VNVME_SKIPS_LIST", path);
    }
    if ci {
        command.env("CI", "true");
    }
    let output = command.output().unwrap();
    Ran {
        code: output.status.code(),
        text: String::from_utf8(output.stdout).unwrap(),
    }
}

const LIST: &str = "# what may be\n\na::[a-z]+: no (loop )?device\nb: why not\n";
const KNOWN: &str = "echo 'a::test: no loop device' >>$VNVME_SKIPS; ";
const UNKNOWN: &str = "echo 'a::test: no loop device at all' >>$VNVME_SKIPS; ";

#[test]
fn unlisted_skip_fails_in_ci_and_is_always_printed() {
    for (script, ci, code, unknown) in [
        ("true", true, 0, false),
        (KNOWN, true, 0, false),
        (KNOWN, false, 0, false),
        (UNKNOWN, true, 1, true),
        (UNKNOWN, false, 0, true),
    ] {
        let ran = run(script, Some(LIST), ci);
        assert_eq!(ran.code, Some(code), "{script}, {ci}: {}", ran.text);
        assert_eq!(
            ran.text.contains("not on the list"),
            unknown,
            "{}",
            ran.text
        );
        assert_eq!(
            ran.text.contains("a::test"),
            script != "true",
            "{}",
            ran.text
        );
        assert!(!ran.text.contains("left::over"), "{}", ran.text);
    }
}

#[test]
fn empty_list_accepts_no_skip() {
    for list in ["", "# nothing\n\n"] {
        assert_eq!(run(KNOWN, Some(list), true).code, Some(1), "{list:?}");
        assert_eq!(run("true", Some(list), true).code, Some(0), "{list:?}");
    }
}

#[test]
fn unreadable_list_accepts_no_skip() {
    let ran = run(KNOWN, Some("a::(test: unclosed\n"), true);
    assert_eq!(ran.code, Some(1), "{}", ran.text);
}

#[test]
fn failed_tests_keep_exit_code_and_print_skips() {
    for script in [KNOWN, UNKNOWN] {
        for ci in [false, true] {
            let ran = run(&format!("{script} exit 7"), Some(LIST), ci);
            assert_eq!(ran.code, Some(7), "{}", ran.text);
            assert!(
                ran.text.contains("1 a::test: no loop device"),
                "{}",
                ran.text
            );
        }
    }
}

/// What a script skips, and what a test does, goes the same way.
#[test]
fn scripts_and_tests_record_skips_in_same_file() {
    let exe = std::env::current_exe().unwrap();
    let test = format!(
        "{} --ignored --exact gate::skips_when_asked_to",
        exe.display()
    );
    let script = format!("{test} && testing/harness/skips.sh --skip 'a script' 'why not'");
    let ran = run(&script, Some("(testkit::gate|a script): why not\n"), true);
    assert_eq!(ran.code, Some(0), "{}", ran.text);
    for line in ["1 testkit::gate: why not\n", "1 a script: why not\n"] {
        assert!(ran.text.contains(line), "{}", ran.text);
    }
}

#[test]
#[ignore = "a process that another test starts: cargo test -p testkit --test it gate"]
fn skips_when_asked_to() {
    testkit::skip("testkit::gate", "why not");
}

/// The repository's own list: valid patterns, none of which matches everything.
#[test]
fn skip_list_of_repository_is_valid() {
    let list = std::fs::read_to_string(root().join(".ci/skips")).unwrap();
    assert!(
        list.lines()
            .any(|line| !line.is_empty() && !line.starts_with('#'))
    );
    let ran = run("echo 'some::test: no reason' >>$VNVME_SKIPS", None, true);
    assert_eq!(ran.code, Some(1), "{}", ran.text);
    let known = "echo 'ublk::newer_kernel_uses_ublk_disk: no newer kernel is given (VNVME_KERNEL)' >>$VNVME_SKIPS";
    let ran = run(known, None, true);
    assert_eq!(ran.code, Some(0), "{}", ran.text);
}

/// The tiers and CI go through the script: nothing of the above holds otherwise.
#[test]
fn tiers_and_ci_run_in_skip_script() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let makefile = read("Makefile");
    let tier = makefile
        .lines()
        .find(|line| line.starts_with("tier = "))
        .unwrap();
    assert!(tier.contains("testing/harness/skips.sh $(TIER) run $(1) $(AGAIN) $(1)-steps"));
    for name in ["test", "test-guests", "test-long"] {
        assert!(
            makefile.contains(&format!("\n\t$(call tier,{name})\n")),
            "{name}"
        );
    }
    assert!(makefile.contains("\nAGAIN = $(MAKE) --no-print-directory\n"));
    let ci = read(".ci/run");
    for line in [
        "export CI=true",
        "make test </dev/null",
        "make test-guests </dev/null",
    ] {
        assert!(ci.lines().any(|have| have == line), "{line}");
    }
}
