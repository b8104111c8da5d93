/* A stand-in for EAR's SPANK plugin: it registers EAR's sbatch options and records, once per job, the value that SLURM took.
   Its argument in plugstack.conf is the file to write to. */
#include <slurm/spank.h>
#include <stdint.h>
#include <stdio.h>

SPANK_PLUGIN(ear_standin, 1);

static struct spank_option options[] = {
    {"ear", "on|off", "Switch EAR on or off", 1, 0, NULL},
    {"ear-policy", "name", "EAR's policy", 1, 0, NULL},
    {"ear-verbose", "level", "EAR's messages", 1, 0, NULL},
};

int slurm_spank_init(spank_t spank, int argc, char **argv) {
    for (int i = 0; i < 3; i++)
        if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS) return -1;
    return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
    char *values[3] = {"", "", ""};
    uint32_t job = 0, step = 0;
    spank_get_item(spank, S_JOB_ID, &job);
    spank_get_item(spank, S_JOB_STEPID, &step);
    for (int i = 0; i < 3; i++) spank_option_getopt(spank, &options[i], &values[i]);
    FILE *file = argc ? fopen(argv[0], "a") : NULL;
    if (file == NULL) return 0;
    fprintf(file, "%u %u %s %s %s\n", job, step, values[0], values[1], values[2]);
    fclose(file);
    return 0;
}
