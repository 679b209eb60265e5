// From text to trained models with Nextflow: data, a run for each seed, its loss on other text, export and report.
//
//   nextflow run main.nf                  // trains on this machine
//   nextflow run main.nf --here false     // queues a Slurm job for each seed; run it on a login node
//   nextflow run main.nf -resume          // goes on after an interruption, and waits for the same jobs

params.texts = 'texts'
params.tokenizer = 'bytes'
params.test_text = 'test.txt'
params.run_file = 'run.yaml'
params.seeds = '0,1'
params.here = true
params.results = 'results'

process DATA {
    input:
    path texts

    output:
    path 'data'

    script:
    """
    hpctrain data prepare ${texts} -o data --tokenizer "${params.tokenizer}"
    """
}

// Returns at once. The answer is cached, so that `-resume` waits for the same run. If this process itself is interrupted,
// look at `hpctrain list` before you start again: a job may be queued already.
process SUBMIT {
    input:
    tuple val(seed), path(run_file), path(data)

    output:
    tuple val(seed), path('job.json')

    script:
    def here = params.here.toString() == 'true' ? '--local' : ''
    """
    hpctrain submit ${run_file} ${here} --set name=recipe-${seed} --set seed=${seed} \\
        --set data.train="[\$(realpath ${data})]" --json > job.json
    """
}

// Waits through requeues and following jobs. Fails if the run has failed: then `hpctrain resubmit`, and -resume.
process WAIT {
    input:
    tuple val(seed), path(job)

    output:
    tuple val(seed), env('RUN')

    script:
    """
    RUN=\$(python3 -c 'import json, sys; print(json.load(sys.stdin)["folder"])' < ${job})
    hpctrain watch "\$RUN"
    """
}

process EVALUATE {
    publishDir "${params.results}", mode: 'copy', saveAs: { name -> "${seed}/${name}" }

    input:
    tuple val(seed), val(run), path(text)

    output:
    path 'loss.json'

    script:
    """
    hpctrain eval "${run}" ${text} --json > loss.json
    """
}

process EXPORT {
    publishDir "${params.results}", mode: 'copy', saveAs: { name -> "${seed}/${name}" }

    input:
    tuple val(seed), val(run)

    output:
    path 'model'

    script:
    """
    hpctrain export "${run}" -o model
    """
}

process REPORT {
    publishDir "${params.results}", mode: 'copy', saveAs: { name -> "${seed}/${name}" }

    input:
    tuple val(seed), val(run)

    output:
    path 'report.html'

    script:
    """
    hpctrain report "${run}" -o report.html
    """
}

workflow {
    seeds = channel.fromList(params.seeds.toString().tokenize(','))
    data = DATA(file(params.texts))
    submitted = SUBMIT(seeds.combine(channel.of(file(params.run_file))).combine(data))
    runs = WAIT(submitted)
    EVALUATE(runs.combine(channel.of(file(params.test_text))))
    EXPORT(runs)
    REPORT(runs)
}
